"""What holds for every test."""

from hypothesis import settings

# Hypothesis fails an example that takes longer than 200 ms. On a busy machine that says nothing of the code.
settings.register_profile("recap", deadline=None)
settings.load_profile("recap")
