"""Properties draw the same examples in every run and are not timed: a busy machine must not fail them."""

from hypothesis import settings

settings.register_profile("reproducible", deadline=None, derandomize=True, database=None)
settings.load_profile("reproducible")
