"""Returned: objects of a script's own classes that come back from processes of every start method.

A child that multiprocessing spawns imports the script as ``__mp_main__`` and pickles its classes
under that name, so the script's process must find them there, too. Arguments are the start methods
to try, without torch; without any, all are tried.
"""

import concurrent.futures
import json
import multiprocessing
import os
import sys
import traceback

METHODS = ("fork", "spawn", "forkserver")
DEADLINE = 60


class Point:
    def __init__(self, x):
        self.x = x


class Refused(Exception):
    pass


class Batch(list):
    pass


class Points:
    """A data set of points."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Point(index)


def collated(points):
    return Batch(points)


def point(x):
    return Point(x)


def refuse(x):
    raise Refused(x)


def put(queue):
    queue.put(Point(2))


def send(connection):
    connection.send([Point(4)])
    connection.close()


def seen(found):
    """Name the class of what came back, and say whether it is this module's own."""
    return [type(found).__name__, isinstance(found, (Point, Batch, Refused)), vars(found)]


def pool(context):
    with context.Pool(2) as workers:
        return [seen(found) for found in workers.map_async(point, range(3)).get(DEADLINE)]


def raised(context):
    with context.Pool(1) as workers:
        try:
            workers.apply_async(refuse, (5,)).get(DEADLINE)
        except Refused as error:
            return [*seen(error), error.args]


def queue(context):
    between = context.Queue()
    child = context.Process(target=put, args=(between,))
    child.start()
    found = between.get(timeout=DEADLINE)
    child.join(DEADLINE)
    return seen(found)


def pipe(context):
    ours, theirs = context.Pipe()
    child = context.Process(target=send, args=(theirs,))
    child.start()
    (found,) = ours.recv() if ours.poll(DEADLINE) else [Point(None)]
    child.join(DEADLINE)
    return seen(found)


def executor(context):
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as workers:
        return seen(workers.submit(point, 6).result(DEADLINE))


def loader(context):
    import torch

    options = {"collate_fn": collated, "multiprocessing_context": context, "timeout": DEADLINE}
    batches = list(torch.utils.data.DataLoader(Points(), 2, num_workers=1, **options))
    return [[seen(batch), [seen(each) for each in batch]] for batch in batches]


ITEMS = (pool, raised, queue, pipe, executor, loader)


def outcome(item, context):
    try:
        return item(context)
    except Exception:
        return ["raised", traceback.format_exc()]


def main():
    names = [sys.modules.get(name) for name in ("__main__", "__mp_main__")]
    found = {
        "classes in": [getattr(module, "Point", None) is Point for module in names],
        "one module": names[0] is names[1],
    }
    methods = sys.argv[1:]
    for method in methods or METHODS:
        context = multiprocessing.get_context(method)
        items = [item for item in ITEMS if item is not loader or not methods]
        found[method] = {item.__name__: outcome(item, context) for item in items}
    with open(os.path.join(os.environ["PARITY_OUT"], "returned.json"), "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
