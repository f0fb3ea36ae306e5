"""What trained weights look like, and drawing it."""
