"""What a finished run shows: its record, the findings, the words for them, and the release gate."""
