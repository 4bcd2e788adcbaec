"""Pictures of plans, machines, timelines and results: pure functions -> Figure; see figure.py.

Importing this package imports no tensor library, no plotly, no ipywidgets.
`python -m visualize RESULT.json -o OUT.svg` draws a demo result.
"""

from .balance import balance
from .compare import compare
from .figure import Figure, together
from .hops import hops
from .links import links
from .machines import topology
from .masks import mask
from .memory import memory
from .results import View, results
from .rings import rings
from .timeline import timeline

__all__ = [
    "Figure",
    "balance",
    "compare",
    "hops",
    "links",
    "mask",
    "memory",
    "rings",
    "timeline",
    "together",
    "topology",
]
