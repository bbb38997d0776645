"""Models, data and losses of the user's own."""
