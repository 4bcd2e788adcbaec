"""TASP: sequence-parallel attention as data. `import tasp_core as tasp`; see README.md.

Importing this package, and planning, imports no tensor library.
"""
from .check import Report, check
from .documents import Documents
from .errors import LayoutError, PlanError, TopologyError, TransportError
from .layout import layouts
from .plan import Plan, plan, supports
from .rings import Rings, decompose
from .schedules import schedules
from .topology import Machine, cut_bound, machine
