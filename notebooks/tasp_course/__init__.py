"""The course's own code: checks of exercises, one module per unit, and the builder of the notebooks.

verdict.py says how a check is written; `python -m tasp_course.build` makes the notebooks from ../src.
"""

from .verdict import Verdict, exercise, expect, recap

__all__ = ["Verdict", "exercise", "expect", "recap"]
