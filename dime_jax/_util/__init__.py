"""What every room may use: it knows no image, no model and no attack."""
