# %% [markdown]
# # Sequence-parallel attention: the course
#
# One long sequence of tokens, many accelerators: which rank sends whose keys and values to which other
# rank, and when? You draw the answer, prove it, run it on real processes of this machine, and predict how
# long it takes on other machines. You need no GPU, no network and no knowledge of `torch.distributed`. You
# need Python, a little of torch's tensors, and an idea of what attention computes.
#
# <!-- units -->
#
# ## How a unit works
#
# Run its cells from the top, one by one: click the first, then Shift+Enter. A unit begins with a picture
# and a question. Then come exercises: a cell with `...` to be replaced, and right below it a check. Change
# your cell, run it, run the check, as often as you like. The check says `still to do`, `not yet` with a
# hint, or `right`; it never stops the notebook. At the end there is something to play with, and five recap
# questions.
#
# The solved notebooks are in `solved/`, under the same names. Your answers are kept in the notebook
# itself; work in a copy of `learner/` if you want to keep them through a `git pull` or `make course`.
#
# Half a day: units 1, 2, 5, 6. One day: 1 to 7. A term: all. Begin with unit 0 in any case: it takes
# minutes and shows whether everything works here:

# %%
import tasp_core as tasp

print(tasp.launch(lambda rank, group: f"rank {rank} is here", 4))

# %% [markdown]
# That took some seconds, most of them to load torch. A **rank** is one process with one accelerator; here
# four processes share this machine instead.
#
# The picture below is the subject of the course: five ranks, each with its part of the keys and values
# (KV). Every rank's KV is cut into chunks, called **shares**, and each share travels round a ring of its
# own. Every link between two ranks is used, and none of them twice.

# %%
import visualize

visualize.rings(tasp.plan([600, 90, 334], ranks=5, schedule="tasp"))
