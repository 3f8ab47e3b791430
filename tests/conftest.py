"""Hypothesis profiles, chosen by the environment variable HYPOTHESIS_PROFILE."""

import os

from hypothesis import settings

settings.register_profile("dev", max_examples=30, deadline=None)
# plain Python instead of compiled kernels: tox -e nojit
settings.register_profile("quick", max_examples=8, deadline=None, derandomize=True)
settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=500, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
