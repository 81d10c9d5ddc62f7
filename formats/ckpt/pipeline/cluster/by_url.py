"""The cluster at a URL."""

from ckpt.pipeline.cluster.cluster import Cluster
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.text import printable


def connect(url: str) -> Cluster:
    """The cluster at a URL: `dask://HOST:PORT`, `ray://HOST:PORT`, `ray://auto` or `ray://`.

    Raises `InvalidArgumentError` if it is none, `UnsupportedError` if the package is not installed, or if the workers
    have another version of ckpt or none; `OutputError` if nobody answers.
    """
    kind, separator, _ = url.partition("://")
    try:
        if separator and kind in ("dask", "dask+tls"):
            from ckpt.pipeline.cluster.dask_cluster import DaskCluster

            return DaskCluster(url)
        if separator and kind == "ray":
            from ckpt.pipeline.cluster.ray_cluster import RayCluster

            return RayCluster(url)
    except ModuleNotFoundError as error:
        extra = kind.partition("+")[0]
        raise UnsupportedError(
            f"this executor needs the package {error.name}",
            where=printable(url),
            hint=f"Install it, here and on all workers: pip install 'ckpt-suite[{extra}]'.",
        ) from None
    raise InvalidArgumentError(
        "is not an executor that ckpt knows",
        where=printable(url),
        hint="It is dask://HOST:PORT, ray://HOST:PORT, or ray:// for a cluster that runs here.",
    )
