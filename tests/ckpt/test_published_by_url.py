"""Followers and commands read a published chain by its URL: of `ckpt serve`, of a plain web server, behind a cache."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from caching_proxy import caching_proxy
from ckpt.following import decode
from ckpt.following.follower import Follower
from ckpt.serving import stored_files
from ckpt.serving.server import ChainServer
from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_formats.core.layout import Rule
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.universal.published.records import StepName
from damage import ckpt
from followed_weights import FILES, bytes_of, publish, weights_at
from object_stores import BUCKET, StoreServer, observed, reached
from published import PublishedRun
from static_server import static_server

HERE = NetworkAddress("127.0.0.1", 0)


@pytest.fixture
def run(tmp_path: Path) -> PublishedRun:
    """Steps 1 to 3 of two ranks; step 1 is a base."""
    run = PublishedRun(tmp_path / "policy.chain", weights_at(1), ranks=2, files=FILES)
    publish(run, range(1, 4))
    return run


@contextmanager
def url_of(run: PublishedRun, way: str) -> Iterator[str]:
    if way == "plain":
        with static_server(run.run.parent) as url:
            yield f"{url}/{run.run.name}"
        return
    server = ChainServer(run.run, HERE)
    try:
        if way == "served":
            yield server.url
        else:
            with caching_proxy(f"http://{server.address}") as cache:
                yield f"{cache.url}/{run.run.name}"
    finally:
        server.close()


def is_at(follower: Follower, run: PublishedRun, step: int) -> bool:
    tensors = {name: values.tobytes() for name, values in follower.tensors().items()}
    return tensors == bytes_of(run.states[StepName(run.epoch, step)])


def test_chain_in_a_bucket_is_served(run: PublishedRun, user: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its followers hear of a step by the server's looks, however many they are, and none goes to the bucket."""
    monkeypatch.setattr(stored_files, "_BLOCK", 200_000)
    user.upload(run.run)
    with observed(user) as (server, requests), reached(server):
        serving = ChainServer(f"s3://{BUCKET}/{run.run.name}", HERE)
        try:
            with ThreadPoolExecutor(4) as pool:

                def follow(number: int) -> None:
                    with Follower(serving.url) as follower:
                        for step in (3, 4):
                            assert follower.wait(timeout=120.0, every=0.01) is not None
                            follower.update()
                            assert is_at(follower, run, step)
                            if step == 3:
                                at_three.release()

                at_three = threading.Semaphore(0)
                pending = [pool.submit(follow, number) for number in range(4)]
                for _ in pending:
                    assert at_three.acquire(timeout=120)
                before, began = len(requests), time.monotonic()
                time.sleep(1.0)
                assert len(requests) - before < 16 * (time.monotonic() - began)  # four followers wait
                run.publish(4, weights_at(4))
                user.upload(run.run)
                for one in pending:
                    one.result()
            with pytest.raises(CkptError, match="there is none"):
                ChainServer(f"s3://{BUCKET}/other.chain", HERE)
        finally:
            serving.close()


def test_server_of_a_web_server_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="is a web server already"):
        ChainServer("http://localhost:1/policy.chain", HERE)


@pytest.mark.parametrize("way", ["served", "plain", "cached"])
def test_follower_and_commands_read_a_published_chain(way: str, run: PublishedRun, tmp_path: Path) -> None:
    with url_of(run, way) as url, Follower(url) as follower:
        follower.update()
        assert is_at(follower, run, 3)
        assert follower.files().keys() == FILES.keys()
        for step in (4, 5, 6):
            run.publish(step, weights_at(step), base=step == 5)
            assert follower.wait(timeout=120.0) is not None
            follower.update()
            assert is_at(follower, run, step)
        assert ckpt("inspect", url).code == 0
        done = ckpt("restore", f"{url}@6", tmp_path / "by-url")
        assert done.code == 0, done
        assert ckpt("restore", f"{run.run}@6", tmp_path / "by-path").code == 0
        assert ckpt("diff", tmp_path / "by-url", tmp_path / "by-path").code == 0


def test_follower_hears_of_a_step_at_once(run: PublishedRun) -> None:
    """The server answers when the head is replaced: `every` is longer than the test waits."""
    with url_of(run, "served") as url, Follower(url) as follower:
        follower.update()
        thread = threading.Timer(0.2, lambda: run.publish(4, weights_at(4)))
        thread.start()
        began = time.monotonic()
        seen = follower.wait(timeout=300.0, every=300.0)
        thread.join()
        assert seen is not None
        assert seen.step == 4
        assert time.monotonic() - began < 20  # less than the server waits at most


def test_follower_goes_on_when_the_server_is_started_again(run: PublishedRun) -> None:
    server = ChainServer(run.run, HERE)
    with Follower(server.url) as follower:
        follower.update()
        server.close()
        run.publish(4, weights_at(4))
        begin = threading.Timer(0.5, lambda: servers.append(ChainServer(run.run, server.address)))
        servers: list[ChainServer] = []
        begin.start()
        follower.update()
        begin.join()
        assert is_at(follower, run, 4)
    servers[0].close()


@pytest.mark.parametrize("way", ["whole", "ranges"])
def test_object_that_a_cache_has_damaged_is_read_past_it(
    way: str, run: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [Rule("embed.*", axis=1), Rule(".*", "replicated")]
    options: dict[str, Any] = {"tp": 2, "rules": rules} if way == "ranges" else {}
    monkeypatch.setattr(decode, "_WHOLE_NBYTES", 0)
    monkeypatch.setattr(decode, "_GAP_NBYTES", 0)
    server, expected = ChainServer(run.run, HERE), bytes_of(run.states[StepName(1, 3)])
    if way == "ranges":
        expected["embed.weight"] = run.states[StepName(1, 3)]["embed.weight"][:, :256].tobytes()
    with caching_proxy(f"http://{server.address}") as cache:
        for _ in range(2):
            with Follower(f"{cache.url}/{run.run.name}", patience=0.0, **options) as follower:
                follower.update()
                assert {name: one.tobytes() for name, one in follower.tensors().items()} == expected
            for path, (headers, body) in list(cache.bodies.items()):
                if "/objects/" in path and not body.startswith(b"{"):
                    cache.bodies[path] = (headers, body[:-1] + bytes([body[-1] ^ 1]))
    server.close()


def test_fifty_followers_behind_a_cache_take_the_bytes_of_one(run: PublishedRun) -> None:
    server = ChainServer(run.run, HERE)
    with caching_proxy(f"http://{server.address}") as cache:

        def follow(number: int) -> None:
            with Follower(f"{cache.url}/{run.run.name}") as follower:
                follower.update()
                assert is_at(follower, run, 3)

        follow(0)
        first = cache.fetched
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(follow, range(49)))
        assert cache.fetched <= 1.1 * first
    server.close()
