"""forwardtune inside other libraries' training loops."""
