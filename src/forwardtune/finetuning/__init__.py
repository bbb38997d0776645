"""One model tuned to one task: a comparison of a single run, whose model is saved with a card and can be asked.

tune     makes the run and saves the model that it leads to
pace     measures how long its queries and evaluations take
budget   how long it takes, or how long it may be in a given time
tuned    a tuned model in a folder, ready to answer
card     the model in a page of Markdown
"""
