"""Pickles that attack their reader: each is refused with a typed error or harmless, and none runs anything."""

import io
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_formats.containers import torchfile
from ckpt_formats.containers.torchfile import load_pickle, open_file, tensor_of
from ckpt_formats.containers.torchfile import pickle_reader as interpreter
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.values import Global, Record

Typed = (CorruptError, UnsafeError, UnsupportedError)
FORMATS = Path(torchfile.__file__).parents[2]

# A small assembler


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def named(qualname: str) -> bytes:
    module, _, name = qualname.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def number(value: int) -> bytes:
    length = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True)


def items(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def call(function: bytes, *args: bytes) -> bytes:
    return function + items(*args) + b"R"


def pickled(*parts: bytes, protocol: int = 2) -> bytes:
    return bytes([0x80, protocol]) + b"".join(parts) + b"."


NUMPY = "numpy.core.multiarray."


def numpy_type(code: str) -> bytes:
    return call(named("numpy.dtype"), text(code))


def numpy_array(length: int, code: str, data: bytes) -> bytes:
    unfilled = call(named(NUMPY + "_reconstruct"), named("numpy.ndarray"), items(b"K\x00"), text("b"))
    return unfilled + items(b"K\x01", items(number(length)), numpy_type(code), b"\x89", data) + b"b"


def numpy_scalar(dtype: bytes, data: bytes = b"C\x01x") -> bytes:
    return call(named(NUMPY + "scalar"), dtype, data)


def numpy_buffer(code: str, length: int, order: str) -> bytes:
    how = (b"C\x01x", numpy_type(code), items(number(length)), text(order))
    return call(named("numpy.core.numeric._frombuffer"), *how)


# Everything that runs something when called, or leads to what does

_NAMES = """
os.system posix.system nt.system os.popen os.execv os.spawnv os.remove os.putenv
subprocess.Popen subprocess.check_output subprocess.call subprocess.run commands.getoutput
builtins.exec builtins.eval builtins.__import__ builtins.compile builtins.open builtins.globals builtins.breakpoint
builtins.input builtins.print builtins.vars builtins.setattr builtins.delattr builtins.type builtins.map builtins.super
builtins.memoryview builtins.property builtins.classmethod builtins.iter builtins.next builtins.apply builtins.hasattr
__builtin__.eval __builtin__.execfile __builtin__.apply __builtin__.file __builtin__.reload __builtin__.__import__
importlib.import_module importlib.reload importlib.machinery.SourceFileLoader runpy.run_path runpy.run_module
code.interact code.InteractiveInterpreter codeop.compile_command pty.spawn shutil.rmtree shutil.copy
socket.socket socket.create_connection webbrowser.open ctypes.CDLL ctypes.cast _ctypes.PyObj_FromPtr
pickle.loads pickle.load pickle.Unpickler _pickle.loads _pickle.Unpickler cPickle.loads marshal.loads shelve.open
types.CodeType types.FunctionType types.MethodType types.new_class types.coroutine
functools.partial functools.reduce functools.cached_property _functools.partial operator.attrgetter
operator.methodcaller operator.itemgetter _operator.attrgetter _operator.methodcaller _operator.call
timeit.timeit timeit.main pdb.run pdb.Pdb cProfile.run profile.run bdb.Bdb trace.Trace doctest.debug_script
asyncio.run asyncio.subprocess.create_subprocess_shell asyncio.unix_events._UnixSubprocessTransport
multiprocessing.Process multiprocessing.util.spawnv_passfds concurrent.futures.ProcessPoolExecutor threading.Thread
_thread.start_new_thread tempfile.mkdtemp zipimport.zipimporter sys.setrecursionlimit sys.exit sys._getframe
io.open io.FileIO io.open_code _io.FileIO codecs.open _codecs.decode _codecs.lookup _codecs.register
logging.FileHandler logging.config.fileConfig urllib.request.urlopen urllib.request.urlretrieve urllib2.urlopen
http.client.HTTPConnection smtplib.SMTP ftplib.FTP imaplib.IMAP4 xmlrpc.client.ServerProxy
atexit.register signal.signal signal.raise_signal faulthandler._sigsegv gc.get_objects inspect.getsource
weakref.finalize site.main venv.create ensurepip.bootstrap pip.main pip._internal.cli.main.main setuptools.setup
distutils.core.setup distutils.file_util.write_file lib2to3.pgen2.pgen.ParserGenerator pydoc.pipepager
pydoc.locate idlelib.pyshell.main
test.support.script_helper.assert_python_ok copyreg.add_extension copyreg.__newobj__ copyreg.dispatch_table
copy_reg.__reduce_ex__ collections.namedtuple collections.UserDict enum.Enum dataclasses.make_dataclass
argparse.FileType argparse.ArgumentParser datetime.datetime_CAPI decimal.setcontext pathlib.os pathlib._local.os
uuid._generate_time_safe fractions.operator typing.get_type_hints string.Formatter warnings.warn unittest.mock.patch
torch.load torch.hub.load torch.hub.load_state_dict_from_url torch.jit.load torch.compile torch.ops.load_library
torch.classes.load_library torch.utils.cpp_extension.load_inline torch.utils.cpp_extension.load torch.save
torch.storage._load_from_bytes torch.serialization.load torch.package.package_importer._load
torch._inductor.codecache.compile_file torch._dynamo.guards.eval torch.distributed.run.main torch._utils.os
torch._utils._import_dotted_name torch.utils.collect_env.run torch.fx.graph_module.reduce_graph_module
torch.fx._symbolic_trace.symbolic_trace torch.multiprocessing.reductions.rebuild_storage_fd torch.os torch.sys
torch.distributed.rpc.internal.deserialize torch.utils.data.datapipes.utils.decoder.basichandlers torch.from_file
numpy.load numpy.loadtxt numpy.fromfile numpy.memmap numpy.f2py.compile numpy.f2py.crackfortran.myeval numpy.savetxt
numpy.testing._private.utils.runstring numpy.distutils.exec_command.exec_command numpy.lib.npyio.save
numpy.ctypeslib.load_library numpy.core.multiarray.fromfile numpy.random._pickle.os numpy.vectorize numpy.frompyfunc
pandas.read_pickle pandas.eval joblib.load dill.loads dill._dill._create_function cloudpickle.loads
cloudpickle.cloudpickle._make_function cloudpickle.cloudpickle.subimport yaml.unsafe_load yaml.load sympy.sympify
scipy.io.loadmat sklearn.utils.parallel_backend requests.get aiohttp.request fsspec.open IPython.start_ipython
transformers.pipeline transformers.utils.hub.cached_file huggingface_hub.snapshot_download tensorflow.saved_model.load
keras.models.load_model deepspeed.launcher.runner.main deepspeed.utils.init_on_device.os megatron.training.pretrain
accelerate.utils.other.load lightning.fabric.utilities.load.torch_load paramiko.client_exec numba.jit cffi.verify
ray.get dask.compute triton.compile apex.amp.initialize safetensors.torch.load_file nltk.download
"""
DANGEROUS = _NAMES.split()

FORMS: dict[str, Callable[[str, bytes], bytes]] = {
    "only named": lambda name, _: pickled(named(name)),
    "called": lambda name, arg: pickled(call(named(name), arg)),
    "named from the stack": lambda name, arg: pickled(
        text(name.rpartition(".")[0]), text(name.rpartition(".")[2]), b"\x93", items(arg), b"R", protocol=4
    ),
    "as an old instance": lambda name, arg: pickled(
        b"(", arg, b"i", *f"{name.rpartition('.')[0]}\n{name.rpartition('.')[2]}\n".encode().split(b"\0")
    ),
    "as an old object": lambda name, arg: pickled(b"(", named(name), arg, b"o"),
    "as a new object": lambda name, arg: pickled(named(name), items(arg), b"\x81"),
    "with keywords": lambda name, arg: pickled(named(name), b")}", text("x"), arg, b"s\x92", protocol=4),
    "given a state": lambda name, arg: pickled(call(named(name)), arg, b"b"),
    "as the factory of a dict": lambda name, _: pickled(call(named("collections.defaultdict"), named(name))),
    "as the type of a tensor": lambda name, arg: pickled(
        call(named("torch._tensor._rebuild_from_type_v2"), named(name), named("torch.Tensor"), items(arg), b"}")
    ),
    "inside a class": lambda name, arg: pickled(call(named("builtins.getattr"), named(name), text("X"))),
    "through the object maker": lambda name, _: pickled(
        call(named("copyreg._reconstructor"), named(name), named("builtins.object"), b"N")
    ),
}


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[bytes]:
    """An argument that, executed by a shell or by Python, would leave a file behind."""
    file = tmp_path / "canary"
    yield text(f"__import__('os').system('touch {file}')  # '; touch {file}")
    assert not file.exists()


@pytest.mark.parametrize("form", FORMS)
def test_no_name_that_can_run_something_is_let_in(form: str, canary: bytes) -> None:
    assert len(DANGEROUS) == len(set(DANGEROUS)) > 200
    for name in DANGEROUS:
        with pytest.raises(UnsafeError) as caught:
            load_pickle(FORMS[form](name, canary), "here")
        assert f"`{name}`" in caught.value.what
        assert caught.value.hint is not None
        assert caught.value.hint.startswith("Nothing was run")
        assert caught.value.where == "here"


def test_the_canary_would_sing_for_python_itself(tmp_path: Path) -> None:
    file = tmp_path / "sung"
    pickle.loads(FORMS["called"]("os.system", text(f"touch {file}")))
    assert file.exists()


WHERE_NAMES_HIDE = {
    "dotted": named("collections.OrderedDict").replace(b"OrderedDict", b"abc.sys.modules"),
    "dotted from the stack": text("torch") + text("serialization.os.system") + b"\x93",
    "dotted through an allowed class": text("collections") + text("OrderedDict.__init__.__globals__") + b"\x93",
    "empty module": b"c\nsystem\n",
    "empty name": b"cos\n\n",
    "relative module": b"c.os\nSystem\n",
    "path as module": b"c../../evil\nX\n",
    "spaces": b"cos \nsystem\n",
    "full-width letters": text("\uff4f\uff53") + text("system") + b"\x93",
    "nul": b"cos\0x\nX\n",
    "not text": b"K\x01K\x02\x93",
    "bytes": b"C\x02osC\x06system\x93",
    "module is a name": named("a.B") + text("x") + b"\x93",
    "dunder": named("mypackage.__reduce__"),
    "long": b"c" + b"a" * 300 + b"\nX\n",
    "longer than a line": b"c" + b"a" * 5000 + b"\nX\n",
    "not utf-8": b"c\xff\xfe\nX\n",
    "no newline": b"cos",
    "terminal codes": b"c\x1b]8;;file:///etc\x07\nX\n",
    "getattr of a module": call(named("builtins.getattr"), text("os"), text("system")),
    "getattr of a dict": call(named("builtins.getattr"), b"}", text("pop")),
    "getattr of a method": call(named("builtins.getattr"), named("collections.OrderedDict"), text("__init__")),
    "getattr of globals": call(named("builtins.getattr"), named("mypackage.Thing"), text("__globals__")),
    "getattr of a constructor": call(named("builtins.getattr"), named("datetime.datetime"), text("fromtimestamp")),
    "getattr of a path": call(named("builtins.getattr"), named("pathlib.Path"), text("Unlink")),
    "getattr twice": call(
        named("builtins.getattr"), call(named("builtins.getattr"), named("a.B"), text("C")), text("__x__")
    ),
    "getattr of getattr": call(named("builtins.getattr"), named("builtins.getattr"), text("X")),
    "getattr deep": b"".join([named("builtins.getattr") + b"("] * 6) + named("a.B") + (text("C") + b"tR") * 6,
    "getattr with a default": call(named("builtins.getattr"), named("a.B"), text("C"), b"N"),
    "getattr dotted": call(named("builtins.getattr"), named("a.B"), text("C.D")),
    "lower-case attribute called": call(call(named("builtins.getattr"), named("a.B"), text("load")), text("x")),
    "calling a string": call(text("os.system"), text("x")),
    "calling a record": call(call(named("a.B")), text("x")),
    "calling a list": b"](tR",
    "calling a tensor's class": named("torch._utils._rebuild_tensor_v2") + b")\x81",
    "new of a record": call(named("a.B")) + b")\x81",
    "new of a number": b"K\x01)\x81",
    "new of a function": named("builtins.getattr") + items(named("a.B"), text("C")) + b"\x81",
    "object of a string": b"(" + text("os") + text("system") + b"o",
    "object of nothing": b"(o",
    "arguments that are a list": named("a.B") + b"]R",
    "arguments that are a record": named("a.B") + call(named("a.C")) + b"R",
    "keywords that are no dict": named("a.B") + b")]\x92",
    "keywords that are no names": named("a.B") + b")}K\x01K\x02s\x92",
    "keywords for a builder": named("collections.OrderedDict") + b")}" + text("x") + b"K\x02s\x92",
    "another codec": call(named("_codecs.encode"), text("x"), text("rot13")),
    "a codec that unpacks": call(named("_codecs.encode"), text("x"), text("zlib")),
    "bytes of a huge number": call(named("builtins.bytes"), number(1 << 40)),
    "bytearray of a huge number": call(named("builtins.bytearray"), number(1 << 40)),
    "bytearray of a name": call(named("builtins.bytearray"), named("a.B")),
    "set of a number": call(named("builtins.set"), number(1 << 40)),
    "complex of text": call(named("builtins.complex"), text("1" * 100), b"N"),
    "complex overflow": call(named("builtins.complex"), number(1 << 1100), number(1)),
    "dict of pairs that are none": call(named("collections.OrderedDict"), b"](K\x01K\x02e"),
    "size of text": call(named("torch.Size"), text("12")),
    "size of negative numbers": call(named("torch.Size"), items(number(-1))),
}

STRUCTURE = {
    "nothing": b"",
    "only a stop": b"",
    "underflow": b"R",
    "tuple underflow": b"K\x01\x87",
    "setitem underflow": b"}s",
    "setitems underflow": b"u",
    "append to a tuple": b")K\x01a",
    "append to a dict": b"}K\x01a",
    "append to text": text("x") + b"K\x01a",
    "appends without a list": b"(K\x01e",
    "setitem of a list": b"]K\x01K\x02s",
    "setitem of a tuple": b")K\x01K\x02s",
    "setitem of a name": named("a.B") + b"K\x01K\x02s",
    "setitems odd": b"}(K\x01u",
    "additems to a list": b"](K\x01\x90",
    "build of a list": b"]}b",
    "build of text": text("x") + b"}b",
    "build of a number": b"K\x01}b",
    "build twice": call(named("a.B")) + b"}b}b",
    "build of a dict's methods": call(named("collections.OrderedDict")) + b"(K\x01t" + b"b",
    "two values": b"K\x01K\x02",
    "two pickles": b"K\x01.K\x02",
    "open mark": b"K\x01(",
    "pop of nothing": b"0",
    "popmark without a mark": b"1",
    "dup of nothing": b"2",
    "get of nothing": b"h\x07",
    "long get of nothing": b"j\xff\xff\xff\xff",
    "text get of nothing": b"g99\n",
    "text get of text": b"gabc\n",
    "text get of a negative": b"N" + b"p0\n" + b"g-1\n",
    "put of nothing": b"q\x00",
    "text put of a negative": b"Np-1\n",
    "text put of a huge index": b"Np99999999999999999999\n",
    "memoize of nothing": b"\x94",
    "protocol 6": b"\x80\x06N",
    "unknown opcode": b"\xff",
    "zero bytes": bytes(100),
    "frame beyond the end": b"\x95" + struct.pack("<Q", 1 << 40) + b"N",
    "bytes beyond the end": b"\x8e" + struct.pack("<Q", 1 << 62),
    "bytes beyond 2**63": b"\x8e" + struct.pack("<Q", (1 << 64) - 1),
    "text beyond the end": b"\x8d" + struct.pack("<Q", 1 << 50),
    "bytearray beyond the end": b"\x96" + struct.pack("<Q", 1 << 50),
    "short text beyond the end": b"\x8c\xffabc",
    "old string beyond the end": b"T" + struct.pack("<I", (1 << 32) - 1),
    "text of 4 GB": b"X" + struct.pack("<I", (1 << 32) - 1),
    "bytes of 4 GB": b"B" + struct.pack("<I", (1 << 32) - 1),
    "number of 2 GB": b"\x8b" + struct.pack("<i", (1 << 31) - 1),
    "number of negative length": b"\x8b" + struct.pack("<i", -1),
    "number of 2000 bytes": b"\x8b" + struct.pack("<i", 2000) + b"\1" * 2000,
    "decimal of a million digits": b"I" + b"9" * 1_000_000 + b"\n",
    "decimal of 4000 digits": b"L" + b"9" * 4000 + b"L\n",
    "decimal that is none": b"I1_000\n",
    "decimal in other digits": "I\u0661\n".encode(),
    "float that is none": b"F0x1p3\n",
    "float with underscores": b"F1_0\n",
    "string without quotes": b"Sabc\n",
    "string with half a quote": b"S'abc\n",
    "string with an unknown escape": b"S'\\N{DASH}'\n",
    "text that is not utf-8": b"X\x02\0\0\0\xff\xfe",
    "text of broken escapes": b"V\\uZZZZ\n",
    "extension 1": b"\x82\x01",
    "extension 2": b"\x83\x01\x00",
    "extension 4": b"\x84\x01\x00\x00\x00",
    "persistent text": b"Pos.system\n",
    "persistent": text("x") + b"Q",
    "next buffer": b"\x97",
    "read-only buffer": b"N\x98",
    "list as a key": b"}]K\x01s",
    "dict as a key": b"}}K\x01s",
    "set as a key": b"}\x8fK\x01s",
    "bytearray as a key": b"}\x96" + struct.pack("<Q", 1) + b"x" + b"K\x01s",
    "tuple of lists as a key": b"}](t" + b"}" + b"]\x85K\x01s",
    "list in a set": b"\x8f(]\x90",
    "list in a frozenset": b"(]\x91",
    "huge number as a key": b"}" + number(1 << 100) + b"K\x01s",
    "tuple seven deep as a key": b"}" + b")" + b"\x85" * 7 + b"K\x01s",
    "tuple 400000 deep as a key": b"})" + b"\x85" * 400_000 + b"K\x01s",
    "tuple 400000 deep in a set": b"\x8f()" + b"\x85" * 400_000 + b"\x90",
    "tuple 400000 deep in a frozenset": b"()" + b"\x85" * 400_000 + b"\x91",
    "tuple 400000 deep in an ordered dict": call(
        named("collections.OrderedDict"), b"]())" + b"\x85" * 400_000 + b"K\x01\x86e"
    ),
    "frozensets in each other": b"()\x91" + b"".join([b"q\x00(h\x00\x91"] * 10),
    "wide tuple squared as a key": b"}(" + b"K\x01" * 300 + b"tq\x00" + b"(" + b"h\x00" * 300 + b"t" + b"K\x01s",
    "laughing tuple as a key": b"})q\x00" + b"".join(b"0(" + b"h\x00" * 40 + b"tq\x00" for _ in range(5)) + b"K\x01s",
    "laughing list": b"]q\x00" + b"".join(b"0](" + b"h\x00" * 10 + b"eq\x00" for _ in range(60)),
    "laughing tuple": b")q\x00" + b"".join(b"0(" + b"h\x00" * 10 + b"tq\x00" for _ in range(60)),
    "laughing dict": b"}q\x00" + b"".join(b"0}(K\x01h\x00K\x02h\x00uq\x00" for _ in range(60)),
    "laughing objects": b"Nq\x00" + b"".join(b"0" + named("a.B") + b")\x81h\x00h\x00\x86bq\x00" for _ in range(60)),
    "laughing ordered dict": b"Nq\x00"
    + b"".join(
        b"0" + call(named("collections.OrderedDict")) + b"}(X\1\0\0\0ah\x00X\1\0\0\0bh\x00ubq\x00" for _ in range(60)
    ),
    "stack of a million": b"N" * 1_200_000,
    "marks of a hundred thousand": b"(" * 100_000,
    "names of five thousand classes": b"".join(b"cpkg\nC%d\n0" % i for i in range(5000)) + b"N",
    "numpy array of a list": numpy_array(1, "f8", b"]"),
    "numpy array of too many bytes": numpy_array(1 << 50, "f8", b"C\x01x"),
    "numpy array of negative shape": numpy_array(-1, "f8", b"C\x00"),
    "numpy array of objects of negative shape": numpy_array(-1, "O8", b"]"),
    "numpy array of no size": numpy_array(1 << 60, "S0", b"C\x00"),
    "numpy array of text with no character": numpy_array(1, "U1", b"C\x04\xff\xff\xff\x7f"),
    "numpy array filled twice": numpy_array(1, "u1", b"C\x01x") + b"}b",
    "numpy array that is not one": call(named(NUMPY + "_reconstruct"), named("numpy.ndarray"), b"N", b"N") + b"}b",
    "numpy scalar of objects": numpy_scalar(numpy_type("O8"), b"N"),
    "numpy scalar of another length": numpy_scalar(numpy_type("f8")),
    "numpy type of odd order": numpy_scalar(
        numpy_type("u1") + items(b"K\x03", text("!"), b"N", b"N", b"N", b"K\x01", b"K\x01", b"K\x10") + b"b"
    ),
    "numpy buffer of another length": numpy_buffer("f8", 2, "C"),
    "numpy buffer of odd order": numpy_buffer("u1", 1, "A"),
}


@pytest.mark.parametrize("attack", WHERE_NAMES_HIDE)
def test_no_name_is_smuggled_in(attack: str, canary: bytes) -> None:
    with pytest.raises((UnsafeError, CorruptError)):
        load_pickle(pickled(WHERE_NAMES_HIDE[attack], protocol=4))


def deep_is_slow(attacks: Iterable[str]) -> list[Any]:
    """`make quick` does without those that nest a structure hundreds of thousands deep."""
    return [pytest.param(a, marks=pytest.mark.slow) if "400000" in a else a for a in attacks]


@pytest.mark.parametrize("attack", deep_is_slow(STRUCTURE))
def test_no_malformed_pickle_is_let_in(attack: str) -> None:
    data = pickled(STRUCTURE[attack], protocol=4)
    with pytest.raises(Typed) as caught:
        load_pickle(data, "here")
    assert caught.value.where == "here"


HARMLESS = {
    "numpy array of objects": (numpy_array(1, "O8", b"]"), np.ndarray),
    "numpy type of huge size": (numpy_scalar(numpy_type("V999999999999")), Record),
    "numpy type with fields": (
        numpy_scalar(
            numpy_type("V1")
            + items(b"K\x03", text("|"), b"N", items(text("a")), b"}", b"K\x01", b"K\x01", b"K\x10")
            + b"b"
        ),
        Record,
    ),
    "numpy type that evaluates": (numpy_scalar(numpy_type("i4,(2)f8")), Record),
    "numpy type of a name": (numpy_scalar(call(named("numpy.dtype"), named("evil_package.Type"))), Record),
    "numpy type that is a list": (numpy_scalar(call(named("numpy.dtype"), b"]")), Record),
    "list that holds itself": (b"]q\x00h\x00a", list),
    "dict that holds itself": (b"}q\x00K\x01h\x00s", dict),
    "memo with holes": (b"Nr\xff\xff\xff\xffj\xff\xff\xff\xff\x86", tuple),
    "a tuple 400000 deep": (b")" + b"\x85" * 400_000, tuple),
    "a number of 1024 bytes": (b"\x8b" + struct.pack("<i", 1024) + b"\x01" * 1024, int),
    "an unknown class called": (call(named("my_package.load_everything"), text("rm -rf /")), Record),
    "an unknown class with a state": (named("__main__.Config") + b")\x81}b", Record),
    "an attribute that shadows": (call(named("collections.OrderedDict")) + b"}" + text("items") + b"K\x01sb", dict),
    "records in records": (
        named("a.B") + b")R" + b"".join([b"q\x000" + named("a.B") + b"h\x00\x85R"] * 30_000),
        Record,
    ),
    "a factory that is a class": (call(named("collections.defaultdict"), named("evil_package.Runner")), dict),
}


@pytest.mark.parametrize("attack", deep_is_slow(HARMLESS))
def test_odd_but_harmless_pickles_are_read_as_data(attack: str) -> None:
    body, kind = HARMLESS[attack]
    value = load_pickle(pickled(body, protocol=4))
    assert isinstance(value, kind)


def test_a_missing_key_of_a_default_dict_calls_nothing() -> None:
    value = load_pickle(pickled(HARMLESS["a factory that is a class"][0]))
    with pytest.raises(KeyError):
        value["x"]
    assert value.factory == Global("evil_package", "Runner")


def test_attributes_cannot_replace_the_methods_of_a_dict() -> None:
    value = load_pickle(pickled(HARMLESS["an attribute that shadows"][0]))
    assert list(value.items()) == []
    assert value.attrs == {"items": 1}


# Tensors


def tensor_pickle(
    numel: int = 4,
    offset: int = 0,
    size: bytes = items(number(4)),
    stride: bytes = items(number(1)),
    *,
    function: str = "torch._utils._rebuild_tensor_v2",
    storage: bytes | None = None,
    cls: str = "torch.FloatStorage",
    key: bytes = text("0"),
    more: bytes = b"",
) -> bytes:
    mark = items(text("storage"), named(cls), key, text("cpu"), number(numel)) + b"Q"
    hooks = call(named("collections.OrderedDict"))
    return pickled(
        call(named(function), mark if storage is None else storage, number(offset), size, stride, b"\x89", hooks, more)
    )


def archive(path: Path, data: bytes, storage: bytes = bytes(16)) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", data)
        file.writestr("x/byteorder", "little")
        file.writestr("x/data/0", storage)
        file.writestr("x/version", "3\n")
    return path


TENSORS = {
    "reaches behind its storage": tensor_pickle(size=items(number(5))),
    "begins behind its storage": tensor_pickle(offset=4, size=items(number(1))),
    "begins far behind": tensor_pickle(offset=1 << 61),
    "begins before its storage": tensor_pickle(offset=-1),
    "steps out of its storage": tensor_pickle(size=items(number(2)), stride=items(number(4))),
    "steps backwards": tensor_pickle(stride=items(number(-1))),
    "has a negative length": tensor_pickle(size=items(number(-4))),
    "has a length that overflows": tensor_pickle(
        size=items(number(1 << 62), number(4)), stride=items(number(0), number(1))
    ),
    "is expanded to terabytes": tensor_pickle(size=items(number(1 << 40)), stride=items(number(0))),
    "is expanded along two axes": tensor_pickle(
        size=items(number(1 << 20), number(1 << 20)), stride=items(number(0), number(0))
    ),
    "has other axes than strides": tensor_pickle(stride=items(number(1), number(1))),
    "has too many axes": tensor_pickle(size=items(*[number(1)] * 65), stride=items(*[number(1)] * 65)),
    "has true as a length": tensor_pickle(size=items(b"\x88")),
    "has text as a shape": tensor_pickle(size=text("4")),
    "has a float as an offset": pickled(call(named("torch._utils._rebuild_tensor"), b"N", b"G" + bytes(8), b")", b")")),
    "has no storage": tensor_pickle(storage=b"N"),
    "has bytes as a storage": tensor_pickle(storage=b"C\x04abcd"),
    "has a record as a storage": tensor_pickle(storage=call(named("a.B"))),
    "counts more elements than stored": tensor_pickle(numel=5),
    "counts fewer elements than stored": tensor_pickle(numel=3),
    "counts negative elements": tensor_pickle(numel=-1),
    "counts elements that overflow": tensor_pickle(numel=1 << 62),
    "has an unknown storage": tensor_pickle(cls="torch.SecretStorage"),
    "has a storage of another module": tensor_pickle(cls="evil_package.FloatStorage"),
    "has a key that leads elsewhere": tensor_pickle(key=text("../data.pkl")),
    "has a key that is absent": tensor_pickle(key=text("7")),
    "has a key that is a list": tensor_pickle(key=b"]"),
    "has too few arguments": pickled(call(named("torch._utils._rebuild_tensor_v2"), b"N")),
    "has too many arguments": tensor_pickle(more=b"}}"),
    "gives its storage two sizes": pickled(
        items(text("storage"), named("torch.FloatStorage"), text("0"), text("cpu"), number(4)) + b"Q",
        items(text("storage"), named("torch.ByteStorage"), text("0"), text("cpu"), number(4)) + b"Q\x86",
    ),
    "refers to a module": pickled(items(text("module"), named("a.B"), text("f.py"), text("import os")) + b"Q"),
    "refers to text": pickled(text("storage") + b"Q"),
    "refers to a short tuple": pickled(items(text("storage")) + b"Q"),
    "refers to a view": pickled(
        items(text("storage"), named("torch.FloatStorage"), text("0"), text("cpu"), number(4), b"N") + b"Q"
    ),
    "is a parameter of nothing": pickled(call(named("torch._utils._rebuild_parameter"), b"N", b"N", b"N")),
    "is typed by text": tensor_pickle(function="torch._utils._rebuild_tensor_v3", more=text("float32")) + b"x",
    "has a state put on it": tensor_pickle()[:-1] + b"}b.",
}


@pytest.mark.parametrize("attack", TENSORS)
def test_no_tensor_that_lies_is_let_in(tmp_path: Path, attack: str) -> None:
    with pytest.raises(Typed, match=r"x\.pt"):
        open_file(archive(tmp_path / "x.pt", TENSORS[attack]))


def test_the_tensor_that_the_attacks_vary_is_itself_good(tmp_path: Path) -> None:
    opened = open_file(archive(tmp_path / "x.pt", tensor_pickle()))
    assert tensor_of(opened.root).shape == (4,)


def test_attacks_are_of_more_than_a_hundred_kinds() -> None:
    assert len(FORMS) + len(WHERE_NAMES_HIDE) + len(STRUCTURE) + len(HARMLESS) + len(TENSORS) > 180


@pytest.mark.parametrize("attack", ["os.system", "builtins.exec", "torch.hub.load"])
def test_an_attack_is_refused_in_every_container(tmp_path: Path, attack: str, canary: bytes) -> None:
    evil = FORMS["called"](attack, canary)
    with pytest.raises(UnsafeError, match=r"x\.pt \(x/data\.pkl\)"):
        open_file(archive(tmp_path / "x.pt", evil))
    (tmp_path / "plain.pt").write_bytes(evil)
    with pytest.raises(UnsafeError, match=r"plain\.pt"):
        open_file(tmp_path / "plain.pt")
    buffer = io.BytesIO()
    torch.save("HERE", buffer, _use_new_zipfile_serialization=False)
    good = pickle.dumps("HERE", 2)
    assert good in buffer.getvalue()
    (tmp_path / "legacy.pt").write_bytes(buffer.getvalue().replace(good, evil))
    with pytest.raises(UnsafeError, match=r"legacy\.pt"):
        open_file(tmp_path / "legacy.pt")


# Damage


def genuine() -> Any:
    import numpy as np

    return {"a": [1, 2.5, "text", b"bytes", None], ("k", 1): {3, 4}, "n": np.arange(3), "c": 1j, "x": range(3), "o": {}}


def outcomes(data: bytes) -> str:
    try:
        load_pickle(data)
    except Typed as error:
        return type(error).__name__
    return "read"


@pytest.mark.quick(2)
@pytest.mark.parametrize("protocol", range(6))
def test_every_flipped_bit_of_a_pickle_gives_a_value_or_a_typed_error(protocol: int) -> None:
    good = pickle.dumps(genuine(), protocol)
    seen = set()
    for i in range(len(good) * 8):
        bad = bytearray(good)
        bad[i // 8] ^= 1 << i % 8
        seen.add(outcomes(bytes(bad)))
    assert {"read", "CorruptError"} <= seen


@pytest.mark.parametrize("protocol", range(6))
def test_every_truncation_of_a_pickle_is_corrupt(protocol: int) -> None:
    good = pickle.dumps(genuine(), protocol)
    for stop in range(len(good)):
        with pytest.raises(CorruptError):
            load_pickle(good[:stop])


def test_pickles_mutated_at_random_give_values_or_typed_errors() -> None:
    rng = random.Random(7)
    seeds = [pickle.dumps(genuine(), protocol) for protocol in range(6)]
    seeds += [pickled(body, protocol=4) for body in STRUCTURE.values() if len(body) < 500]
    seeds += [pickled(body, protocol=4) for body in WHERE_NAMES_HIDE.values() if len(body) < 500]
    seeds += [data for data in TENSORS.values() if len(data) < 500]
    opcodes = bytes(
        value for name, value in vars(interpreter).items() if name.isupper() and type(value) is int and value < 256
    )
    counts: dict[str, int] = {}
    for _ in range(30_000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    data[at:at] = bytes([rng.choice(opcodes)])
                case 2:
                    del data[at : at + rng.randint(1, 4)]
                case _:
                    other = rng.choice(seeds)
                    start = rng.randrange(len(other))
                    data[at:at] = other[start : start + rng.randint(1, 20)]
            if not data:
                data = bytearray(b".")
        kind = outcomes(bytes(data))
        counts[kind] = counts.get(kind, 0) + 1
    assert {"read", "CorruptError", "UnsafeError"} <= set(counts)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory with RLIMIT_AS")
def test_no_claim_of_a_length_takes_memory(tmp_path: Path) -> None:
    """All attacks again, in a process that may use little more memory than NumPy itself needs."""
    attacks = [pickled(body, protocol=4) for body in STRUCTURE.values()] + list(TENSORS.values())
    (tmp_path / "attacks").write_bytes(pickle.dumps(attacks))
    code = (
        "import ast, resource, struct, sys\n"
        "from ckpt_formats.core.errors import CkptError\n"
        "from ckpt_formats.containers.torchfile import load_pickle\n"
        f"attacks = load_pickle(open({str(tmp_path / 'attacks')!r}, 'rb').read())\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + (200 << 20),) * 2)\n"
        "refused = 0\n"
        "for attack in attacks:\n"
        "    try: load_pickle(attack)\n"
        "    except CkptError: refused += 1\n"
        "print(refused, len(attacks))\n"
    )
    folders = os.pathsep.join([str(FORMATS), str(FORMATS.parent / "codecs")])
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": folders}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    refused, total = map(int, result.stdout.split())
    assert refused == total
