"""One model tuned to one task: made, saved, and asked."""
