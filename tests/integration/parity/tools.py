"""Tools of parity: what debuggers, profilers, test runners and servers see of a script.

Each item is a function that returns what it saw; an exception is an answer, too. Each round writes
a file of its own, and the first ends with 1, so that the second is seen as well. An argument takes
a group of items that need more, and seconds, instead of the others; see GROUPS.
"""

import concurrent.futures
import cProfile
import doctest
import io
import json
import os
import pdb  # noqa: T100 — that is tried
import pstats
import re
import runpy
import subprocess
import sys
import tempfile
import time
import trace
import traceback
import unittest
import warnings


class Point:
    """A class of the script.

    >>> Point(2).doubled()
    4
    """

    def __init__(self, x):
        self.x = x

    def doubled(self):
        return 2 * self.x


class TestPoint(unittest.TestCase):
    def test_doubled(self):
        self.assertEqual(Point(2).doubled(), 4)


def double(x):
    return Point(x).doubled()


def without_places(text):
    return re.sub(r"0x[0-9a-f]+|\S*/(?=test_other)", "", text)


def debugger():
    shown = io.StringIO()
    commands = io.StringIO("step\nargs\nlongest = 3\np longest, __name__\nreturn\ncontinue\n")
    result = pdb.Pdb(stdin=commands, stdout=shown, nosigint=True, readrc=False).runcall(double, 3)
    return [result, without_places(shown.getvalue())]


def post_mortem():
    shown = io.StringIO()
    try:
        double("x").missing()
    except AttributeError as error:
        commands = io.StringIO("list\np sys.argv\nquit\n")
        debug = pdb.Pdb(stdin=commands, stdout=shown, nosigint=True, readrc=False)
        debug.reset()
        debug.interaction(None, error.__traceback__)
    return shown.getvalue()


def profiler():
    profile = cProfile.Profile()
    profile.runcall(lambda: [double(x) for x in range(5)])
    shown = pstats.Stats(profile, stream=io.StringIO()).stats
    return sorted([*place, calls[0]] for place, calls in shown.items() if place[0] == __file__)


def line_counts():
    tracer = trace.Trace(count=1, trace=0)
    tracer.runfunc(double, 3)
    return sorted([*place, count] for place, count in tracer.results().counts.items())


def doctests():
    return list(doctest.testmod())


def unittests():
    shown = io.StringIO()
    runner = unittest.TextTestRunner(stream=shown)
    program = unittest.main(argv=["script"], exit=False, testRunner=runner)
    return [program.result.testsRun, program.result.wasSuccessful(), program.module.__name__]


def pytest_in_the_script():
    import pytest

    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "test_other.py")
        with open(path, "w") as file:
            file.write(
                "import __main__\n"
                "def test_main():\n    assert __main__.double(3) == 6\n"
                "def test_wrong(capsys):\n    print('in')\n    assert __main__.double(1) == 3\n"
            )
        seen = Outcomes()
        with warnings.catch_warnings():
            code = pytest.main(
                ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", directory, path],
                plugins=[seen],
            )
    return [int(code), seen.found]


class Outcomes:
    def __init__(self):
        self.found = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.found.append(
                [report.outcome, report.capstdout, without_places(report.longreprtext)]
            )


def flags_and_warnings():
    with warnings.catch_warnings(record=True) as records:
        warnings.warn("shown or not", UserWarning, stacklevel=1)
        warnings.warn("shown or not", DeprecationWarning, stacklevel=1)
    code = "import sys; print(sys.flags.optimize, sys.warnoptions)"
    below = [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code]
    shown = subprocess.run(below, capture_output=True, text=True).stdout
    return [__debug__, doctest.__doc__ is None, len(records), sys.warnoptions, shown]


def module_and_path():
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "other.py")
        with open(path, "w") as file:
            file.write("import sys\nfound = [__name__, sys.argv[1:], 'Point' in globals()]\n")
        return [
            runpy.run_path(path, run_name="__main__")["found"],
            sys.modules["__main__"].__dict__ is globals(),
        ]


def joblib_processes():
    from joblib import Parallel, delayed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Parallel(n_jobs=2, backend="loky")(delayed(double)(x) for x in range(4))
        points = Parallel(n_jobs=2, backend="multiprocessing")(delayed(Point)(x) for x in range(2))
    return [found, [type(point) is Point for point in points]]


def grpc_server():
    import grpc

    methods = {"Double": grpc.unary_unary_rpc_method_handler(lambda data, _: data * 2)}
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Points", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = channel.unary_unary("/Points/Double")(b"ab", timeout=60)
    server.stop(None).wait()
    return answer.decode()


def torch_rpc():
    import torch.distributed.rpc as rpc

    with tempfile.NamedTemporaryFile() as file:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file.name}")
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
        found = [
            rpc.rpc_sync("worker", double, (3,)),
            rpc.remote("worker", Point, (4,)).to_here().x,
        ]
        rpc.shutdown()
    return found


def torch_profiler():
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen, torch.profiler.record_function("a"):
        torch.ones(3).add(1)
    return sorted([event.key, event.count] for event in seen.key_averages())


def torch_processes():
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.map(double, [torch.ones(2)])[0].tolist()


SOURCE = """
#include <Python.h>
static PyObject *tripled(PyObject *self, PyObject *number) {
    return PyLong_FromLong(3 * PyLong_AsLong(number));
}
static PyMethodDef methods[] = {{"tripled", tripled, METH_O, ""}, {NULL}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tripling", "", -1, methods};
PyMODINIT_FUNC PyInit_tripling(void) { return PyModule_Create(&module); }
"""


def cpp_extension():
    from torch.utils.cpp_extension import load_inline

    # Torch's headers would take half a minute; they are the same for all.
    made = load_inline("tripling", SOURCE, no_implicit_headers=True)
    place = os.path.relpath(made.__file__, os.environ["TORCH_EXTENSIONS_DIR"])
    return [made.tripled(2), place]


def jax_of_all_ranks():
    import jax
    from jax.experimental import multihost_utils

    rank, size, port = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    port = port + 1 if port < 65535 else port - 1
    jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{port}", size, rank)
    squared = jax.jit(lambda x: (x @ x.T).sum())(jax.numpy.ones((4, 4)))
    gradient = jax.grad(lambda x: (3 * x**2).sum())(jax.numpy.arange(3.0))
    gathered = multihost_utils.process_allgather(jax.numpy.array([rank + 1]))
    jax.distributed.shutdown()
    return [float(squared), gradient.tolist(), gathered.ravel().tolist(), jax.device_count()]


LIGHT = (
    *(debugger, post_mortem, profiler, line_counts, doctests, unittests, pytest_in_the_script),
    *(flags_and_warnings, module_and_path, joblib_processes, grpc_server),
)
TORCH = (torch_rpc, torch_profiler, torch_processes)
GROUPS = {"torch": TORCH, "together": (cpp_extension,), "jax": (jax_of_all_ranks,)}


def main():
    found = {}
    for item in GROUPS.get(sys.argv[-1], LIGHT):
        try:
            found[item.__name__] = item()
        except Exception:
            found[item.__name__] = ["raised", traceback.format_exc()]
    round = os.environ["TORCHELASTIC_RESTART_COUNT"]
    out = os.environ["PARITY_OUT"]
    with open(os.path.join(out, f"{round}.{os.environ.get('RANK', 0)}.json"), "w") as file:
        json.dump(found, file)
    if round == "0":
        while len(os.listdir(out)) < int(os.environ.get("WORLD_SIZE", 1)):
            time.sleep(0.01)  # the first to end would take the others along
        sys.exit(1)


if __name__ == "__main__":
    main()
