"""Texts and models of language: what is read, how it is asked, and how the answer is judged."""
