"""What a run leaves behind for people: figures, tables and the report page."""
