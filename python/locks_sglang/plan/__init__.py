"""What a machine can serve of a model, and how fast: ``python -m locks_sglang plan``.

Sizes come from the model's configuration, rates from a table of machines, and fixed costs from measured
decode steps.  Nothing here asks the machine that it runs on, so it plans for machines that one has not.
"""
