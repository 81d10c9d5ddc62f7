"""TRL's asynchronous GRPO with a published chain in the place of its NCCL transfer.

Read in TRL 1.16: `WeightTransferProtocol` and `AsyncGRPOTrainer` of `experimental/async_grpo/async_grpo_trainer.py`.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from ckpt_serving.posting import POST_SECONDS, send_requests
from ckpt_serving.vllm_updates import ChainInfo, vllm_attach, vllm_update
from ckpt_training import Publisher
from ckpt_training.installed_classes import installed_class


class TrlTransfer(installed_class("transformers:TrainerCallback")):  # type: ignore[misc]
    """Publishes the weights of TRL's `AsyncGRPOTrainer`, and brings vLLM's workers to each step that it syncs.

    `AsyncGRPOTrainer(..., weight_transfer=transfer, callbacks=[transfer])`: both, since all ranks publish, and TRL
    syncs on one. The servers run with `--weight-transfer-config '{"backend": "ckpt"}'`.
    """

    def __init__(
        self,
        chain: str | os.PathLike[str],
        urls: Sequence[str] = (),
        *,
        api_key: str | None = None,
        seconds: float = POST_SECONDS,
        **options: Any,
    ) -> None:
        """Nothing is written before training begins.

        `chain`: as `Publisher` takes it. `urls`: of vLLM servers, which are updated one after another; none: followers
        find the steps by themselves. `api_key`, `seconds`: for each request. `options`: further ones of `Publisher`.
        """
        self._chain, self._urls, self._options = os.fspath(chain), tuple(urls), options
        self._api_key, self._seconds = api_key, seconds
        self.publisher: Publisher | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        """Publish the first weights, on all ranks."""
        options = {"step": state.global_step, "every": args.weight_sync_steps, **self._options}
        self.publisher = Publisher(model, named["optimizer"], self._chain, **options)
        self.publisher.wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Wait on all ranks until a step that TRL is about to sync is published."""
        if self.publisher is not None and state.global_step % args.weight_sync_steps == 0:
            self.publisher.wait()

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """End the publisher."""
        if self.publisher is not None:
            self.publisher.close()

    def init_weight_transfer(self) -> None:
        """Name the chain to the servers."""
        for url in self._urls:
            send_requests(url, vllm_attach(ChainInfo(self._chain)), self._api_key, self._seconds)

    def send_weights(self, iterator: Iterable[Any]) -> None:
        """Bring the servers to the last published step. Raises `EngineError` if one does not take it."""
        for _ in iterator:
            pass  # the other ranks gather tensors meanwhile, and would wait for ever
        if self.publisher is None or self.publisher.published is None:
            return
        for url in self._urls:
            send_requests(url, vllm_update(self.publisher.published.step), self._api_key, self._seconds)

    def pause(self) -> None:
        """Do nothing: servers are paused only while their workers write."""

    def resume(self) -> None:
        """Do nothing: see `pause`."""

    def destroy(self) -> None:
        """Do nothing: `on_train_end` ends the publisher on all ranks."""
