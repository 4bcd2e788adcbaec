"""Pictures of plans: functions Plan -> SVG text. Reads tasp_core; imports no tensor library.

    rings(plan)               which way keys and values travel
    links([(label, plan)])    how much each link carries, and how many links work in each step
    balance([(label, plan)])  who computes how much, and when

`python -m visualize RESULT.json -o OUT.svg` draws a demo result.
"""

from .balance import balance
from .links import links
from .rings import rings

__all__ = ["balance", "links", "rings"]
