"""A page that sets our numbers beside those that the paper prints."""
