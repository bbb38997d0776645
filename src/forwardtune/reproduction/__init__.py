"""The paper's experiments as specs, and a page that sets our numbers beside the printed ones."""
