"""Wrong answers to unit 3, by check and by what is wrong."""

from functools import partial

import torch
import torch.distributed as dist

from tasp_course.unit_03 import all_send_first

LEFT = []  # messages in flight that no rank waits for


def posts(rank, group, hops, held, *, send, file, make=lambda: torch.empty(4)):
    works, arriving = [], {}
    for src, dst, owner in hops:
        if src == rank:
            works.append(dist.isend(held[send(owner)], dst, group))
        if dst == rank:
            arriving[file(owner, src)] = make()
            works.append(dist.irecv(arriving[file(owner, src)], src, group))
    for work in works:
        work.wait()
    return held | arriving


def own_only(rank, group, hops, held):
    return posts(rank, group, hops, held, send=lambda owner: rank, file=lambda owner, src: owner)


def under_the_sender(rank, group, hops, held):
    held = held | {r: held[rank] for r in range(4) if r not in held}
    return posts(rank, group, hops, held, send=lambda owner: owner, file=lambda owner, src: src)


def waits_for(rank, group, hops, held, *, sends):
    """Waits for its sends only, or for its receives only."""
    works, arriving = [], {}
    for src, dst, owner in hops:
        if src == rank:
            (works if sends else LEFT).append(dist.isend(held[owner], dst, group))
        if dst == rank:
            arriving[owner] = torch.empty(4)
            (LEFT if sends else works).append(dist.irecv(arriving[owner], src, group))
    for work in works:
        work.wait()
    return held | arriving


def receives_one_too_few(rank, group, own):
    got = torch.empty(1)
    if rank:
        dist.recv(got, rank - 1, group)
    if rank < dist.get_world_size(group) - 1:
        dist.send(torch.tensor([own]), rank + 1, group)
    return float(got) if rank else own


def receives_into(make):
    """Exercise 1 with a buffer of the learner's own."""
    return partial(posts, send=lambda owner: owner, file=lambda owner, src: owner, make=make)


def twice_in_a_message(rank, group, hops, held):
    held = {owner: torch.cat([x, x]) for owner, x in held.items()}
    return receives_into(lambda: torch.empty(4))(rank, group, hops, held)


def neighbours(rank, group):
    n = dist.get_world_size(group)
    return (rank + 1) % n, (rank - 1) % n


def turns_with(mine, got):
    """Exercise 2 in a right order, with tensors of the learner's own."""

    def turn(rank, group, own):
        right, left = neighbours(rank, group)
        out, into = mine(own), got()
        if rank % 2:
            dist.recv(into, left, group)
        dist.send(out, right, group)
        if rank % 2 == 0:
            dist.recv(into, left, group)
        return float(into.flatten()[0])

    return turn


def isend_and_wait(rank, group, own):
    right, left = neighbours(rank, group)
    got = torch.empty(1)
    work = dist.isend(torch.tensor([own]), right, group)
    dist.recv(got, left, group)
    work.wait()
    return float(got)


def isend_and_forget(rank, group, own):
    right, left = neighbours(rank, group)
    got = torch.empty(1)
    dist.isend(torch.tensor([own]), right, group)
    dist.recv(got, left, group)
    return float(got)


def irecv_and_wait(rank, group, own):
    right, left = neighbours(rank, group)
    got = torch.empty(1)
    work = dist.irecv(got, left, group)
    dist.send(torch.tensor([own]), right, group)
    work.wait()
    return float(got)


def in_a_batch(rank, group, own):
    right, left = neighbours(rank, group)
    got = torch.empty(1)
    operations = [
        dist.P2POp(dist.isend, torch.tensor([own]), right, group),
        dist.P2POp(dist.irecv, got, left, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return float(got)


def chosen(number):
    return lambda lives: [number(i) for i, _ in enumerate(lives)]


WRONG = {
    "check_move": {
        "always its own KV": own_only,
        "stored under the sender": under_the_sender,
        "a constant: nothing moves": lambda rank, group, hops, held: held,
        "waits for its sends only": partial(waits_for, sends=True),
        "waits for its receives only": partial(waits_for, sends=False),
        "returns the arrived tensors only": lambda rank, group, hops, held: {
            owner: x
            for owner, x in posts(
                rank, group, hops, held, send=lambda owner: owner, file=lambda owner, src: owner
            ).items()
            if owner not in held
        },
        "a buffer too short": receives_into(lambda: torch.empty(3)),
        "a buffer too long": receives_into(lambda: torch.empty(8)),
        "a buffer of another dtype": receives_into(lambda: torch.empty(4, dtype=torch.float16)),
        "each tensor twice in a message": twice_in_a_message,
        "a tensor": lambda rank, group, hops, held: held[rank],
    },
    "check_turn": {
        "all send first": lambda rank, group, own: all_send_first(rank, group),
        "the ring is not closed": receives_one_too_few,
        "a constant": lambda rank, group, own: own,
        "isend, awaited": isend_and_wait,
        "isend, not awaited": isend_and_forget,
        "irecv, awaited": irecv_and_wait,
        "a batch of isend and irecv": in_a_batch,
        "an empty buffer": turns_with(lambda own: torch.tensor([own]), lambda: torch.empty(0)),
        "a longer message": turns_with(
            lambda own: torch.tensor([own, own]), lambda: torch.empty(1)
        ),
    },
    "check_slots": {
        "one slot for all": chosen(lambda i: 0),
        "one slot each": chosen(lambda i: i),
        "a slot for every two shares": chosen(lambda i: i // 2),
        "two slots in turn, whatever the lives": chosen(lambda i: i % 2),
    },
    "check_recap": {
        "times add up": ["isend", 3, 2, 8, 2],
        "a slot for each share": ["isend", 3, 63, 5, 2],
        "one rank does not hang": ["isend", 2, 2, 5, 2],
    },
}
