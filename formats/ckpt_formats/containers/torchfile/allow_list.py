"""Which names may appear in a pickle: tables, and the functions that consult them.

Nothing that a pickle names is ever imported or called, whatever these tables
allow: a name becomes a `Global`, a call of it a `Record`. The allow list
decides which files are refused, because no checkpoint needs what they name:
such a file attacks a reader who opens it with the real `pickle`, and so would
the file that is written from it.

Sources: the globals of some 6,500 files of DeepSpeed, Megatron, PyTorch
Distributed Checkpoint and FSDP, and what `torch.load(weights_only=True)` allows.
"""

import re
import sys

from ckpt_formats.containers.torchfile.storages import STORAGE_CLASSES, STORAGE_MODULES
from ckpt_formats.core.dtypes import DTYPES


def _names(module: str, names: str) -> set[tuple[str, str]]:
    return {(module, name) for name in names.split()}


BUILTINS = ("builtins", "__builtin__")  # Python 3's name, and what protocol 2 writes for it
NUMPY_CORE = ("numpy.core", "numpy._core")  # before NumPy 2, and since

_STANDARD_LIBRARY = {
    *_names("_codecs", "encode"),
    *_names("_io", "BytesIO StringIO"),
    *_names("io", "BytesIO StringIO"),
    *_names("argparse", "Namespace"),
    *_names("collections", "OrderedDict defaultdict Counter deque"),
    *_names("contextlib", "nullcontext"),
    *_names("copyreg", "_reconstructor"),
    *_names("copy_reg", "_reconstructor"),
    *_names("datetime", "date datetime time timedelta timezone"),
    *_names("decimal", "Decimal"),
    *_names("fractions", "Fraction"),
    # A buffer in memory: its constructor runs no code of the file.
    *_names("_io", "BytesIO"),
    *_names("io", "BytesIO"),
    *_names("pathlib", "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"),
    *_names("pathlib._local", "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"),
    *_names("signal", "Signals"),
    *_names("types", "SimpleNamespace"),
    # OmegaConf states the types of its nodes. `getitem` makes `Dict[str, int]`, and nothing else: see builders.py.
    *_names("typing", "Any Dict FrozenSet Iterable List Literal Mapping Optional Sequence Set Tuple Type Union"),
    *_names("_operator", "getitem"),
    *_names("uuid", "UUID SafeUUID"),
}

# Protocol 2 writes a nested class as a call of `getattr`; see builders.py.
_BUILTINS = {
    pair
    for module in BUILTINS
    for pair in _names(
        module,
        "bool bytearray bytes complex dict float frozenset getattr int list long object range set slice str "
        "tuple unicode xrange",
    )
}

_TORCH = {
    *((module, name) for module in STORAGE_MODULES for name in STORAGE_CLASSES),
    *_names("torch", " ".join(DTYPES)),
    *_names("torch", "complex32 chalf half float double cfloat cdouble short int long bfloat16 quint8 qint8 qint32"),
    *_names("torch", "quint4x2 quint2x4 float4_e2m1fn_x2 bits1x8 bits2x4 bits4x2 bits8 bits16"),
    *_names("torch", " ".join(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8))),
    *_names("torch", "device Size Tensor Generator"),
    *_names("torch", "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc _mkldnn jagged"),
    *_names("torch", "contiguous_format preserve_format channels_last channels_last_3d"),
    *_names("torch", "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric"),
    *_names("torch", "per_channel_affine_float_qparams"),
    *_names("torch.serialization", "_get_layout"),
    *_names("torch._tensor", "_rebuild_from_type _rebuild_from_type_v2"),
    *_names("torch.tensor", "_rebuild_from_type"),
    *_names("torch._utils", "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3"),
    *_names("torch._utils", "_rebuild_parameter _rebuild_parameter_with_state"),
    *_names("torch._utils", "_rebuild_sparse_tensor _rebuild_sparse_csr_tensor _rebuild_qtensor"),
    *_names("torch._utils", "_rebuild_nested_tensor _rebuild_meta_tensor_no_storage _rebuild_wrapper_subclass"),
    *_names("torch._utils", "_rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor"),
    *_names("torch._utils", "_rebuild_xla_tensor"),
    *_names("torch.nested._internal.nested_tensor", "_rebuild_njt"),
    *_names("torch.amp.grad_scaler", "_refresh_per_optimizer_state"),
    *_names("torch.cuda.amp.grad_scaler", "_refresh_per_optimizer_state"),
    *_names("torch.distributed.remote_device", "_remote_device"),
    # Activation functions: Megatron and its forks store them in their arguments, by name.
    *_names("torch.nn.functional", "gelu relu relu6 silu sigmoid softmax softplus tanh elu selu leaky_relu mish"),
    *_names("torch._C._nn", "gelu silu softplus elu leaky_relu relu6"),
    *_names("torch", "relu sigmoid tanh selu"),
}

_NUMPY = {
    *_names("numpy", "dtype ndarray"),
    *_names("numpy", "bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 intc uintc longlong ulonglong"),
    *_names("numpy", "float16 float32 float64 longdouble complex64 complex128 clongdouble"),
    *_names("numpy", "str_ bytes_ void object_ datetime64 timedelta64"),
    *((f"{core}.multiarray", name) for core in NUMPY_CORE for name in ("_reconstruct", "scalar")),
    *((f"{core}.numeric", "_frombuffer") for core in NUMPY_CORE),
    *_names("numpy.random._pickle", "__randomstate_ctor __generator_ctor __bit_generator_ctor"),
    *_names("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence __pyx_unpickle_SeedlessSequence"),
}

_ENGINES = {
    # A named tuple, in spite of its name.
    *_names("deepspeed.utils.tensor_fragment", "fragment_address"),
    *_names("deepspeed.utils", "fragment_address"),
}

ALLOWED: frozenset[tuple[str, str]] = frozenset(_STANDARD_LIBRARY | _BUILTINS | _TORCH | _NUMPY | _ENGINES)

# Of these packages only the names above are allowed: almost none of their functions is harmless to call.
_OTHER_PYTHONS = (  # modules of other versions, so that the result does not depend on the running Python
    "aifc annotationlib asynchat asyncore audioop cgi cgitb chunk compression crypt distutils imghdr imp lib2to3 "
    "mailcap msilib nis nntplib ossaudiodev pathlib pipes pty smtpd sndhdr spwd sunau telnetlib uu xdrlib"
)
_PYTHON_2 = (
    "BaseHTTPServer CGIHTTPServer ConfigParser Cookie Dialog DocXMLRPCServer FileDialog HTMLParser Queue ScrolledText "
    "SimpleDialog SimpleHTTPServer SimpleXMLRPCServer SocketServer StringIO Tix Tkconstants Tkdnd Tkinter UserDict "
    "UserList UserString __builtin__ _abcoll _winreg anydbm cPickle cStringIO commands cookielib copy_reg dbhash "
    "dumbdbm dummy_thread exceptions gdbm htmlentitydefs httplib markupbase popen2 repr robotparser test thread ttk "
    "urllib2 urlparse whichdb xmlrpclib"
)
_INSTALLERS = "_distutils_hack nt pip pkg_resources posix setuptools"
CLOSED_PACKAGES: frozenset[str] = frozenset(sys.stdlib_module_names) - {"__main__"} | frozenset(
    f"{_OTHER_PYTHONS} {_PYTHON_2} {_INSTALLERS}".split()
)

# Of these packages all classes are allowed, but no functions: they may run or load things when called.
_KNOWN = (
    "IPython accelerate aiohttp apex cffi cloudpickle cupy dask datasets deepspeed dill fsspec huggingface_hub jax "
    "joblib keras lightning matplotlib megatron nltk numba numpy onnx pandas paramiko pyarrow pydantic "
    "pytorch_lightning ray requests safetensors scipy sklearn sympy tensorflow torch torchaudio torchvision "
    "transformer_engine transformers triton yaml"
)
CLASSES_ONLY: frozenset[str] = frozenset(_KNOWN.split())

MAX_GLOBAL = 256

_CLASS_LIKE = re.compile(r"_{0,2}[A-Z]\w*\Z")

NOTHING_RAN = "Nothing was run. Do not open this file with torch.load or pickle unless you trust who wrote it."
"""The hint of every refusal."""


def refusal(module: str, name: str) -> str | None:
    """Why a pickle that names `module.name` is refused; None if it is not."""
    if (module, name) in ALLOWED:
        return None
    if len(module) > MAX_GLOBAL or len(name) > MAX_GLOBAL:
        return "is too long to be a name"
    if not module.isascii() or not all(part.isidentifier() for part in module.split(".")):
        return "is not the name of a module"
    if not name.isidentifier():
        return "is not a plain name" if name else "is empty"
    package = module.partition(".")[0]
    if package in CLOSED_PACKAGES:
        return "is part of Python itself, and not one of its names that checkpoints need"
    if package in CLASSES_ONLY and not class_like(name):
        return f"looks like a function of {package}, and not one that checkpoints need"
    if name.startswith("__"):
        return "is a name that Python reserves"
    return None


def nested_refusal(module: str, name: str, attribute: str) -> str | None:
    """Why `module.name.attribute`, a class or constant inside a class, is refused; None if it is not."""
    if module.partition(".")[0] in CLOSED_PACKAGES or not class_like(name.rpartition(".")[2]) or name.count(".") > 2:
        return "is not inside a class that has nested classes"
    if not attribute.isidentifier() or attribute.startswith("_") or len(attribute) > MAX_GLOBAL:
        return "is not a plain name"
    return None


def class_like(name: str) -> bool:
    """Whether a name is written like that of a class or a constant: with a capital letter."""
    return _CLASS_LIKE.match(name) is not None
