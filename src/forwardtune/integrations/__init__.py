"""forwardtune inside other people's loops."""
