"""What every room may use; it knows nothing of images, models or attacks."""
