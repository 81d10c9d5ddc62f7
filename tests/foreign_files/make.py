"""Make the small files of this folder with the libraries that they are of: a file each, named by its version.

pip install lightning omegaconf addict tensordict stable-baselines3
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import addict
import gymnasium  # noqa: F401  (PPO takes its environments by name)
import lightning
import torch
from omegaconf import MISSING, OmegaConf
from stable_baselines3 import PPO, SAC
from tensordict import TensorDict

FOLDER = Path(__file__).parent


@dataclass
class Part:
    x: int = 1
    y: str | None = None
    z: list[int] = field(default_factory=lambda: [1, 2])
    d: dict[str, float] = field(default_factory=dict)
    u: int | str = 3
    m: str = MISSING
    t: tuple[int, int] = (1, 2)


@dataclass
class Structured:
    s: Part = field(default_factory=Part)
    name: str = "n"


class Model(lightning.LightningModule):
    def __init__(self, cfg: Any, alpha: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.l = torch.nn.Linear(4, 3)

    def training_step(self, batch: Any, number: int) -> Any:
        return self.l(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(8, 4)), batch_size=4)


def main() -> None:
    model = Model(OmegaConf.create({"model": {"lr": 1e-3, "layers": [1, 2, 3]}}))
    trainer = lightning.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(model)
    trainer.save_checkpoint(FOLDER / "lightning-2.6-omegaconf-2.4.ckpt")
    weights = {"l.weight": torch.rand(3, 4), "l.bias": torch.rand(3)}
    configurations = {
        "omegaconf-2.4-structured": OmegaConf.structured(Structured),
        "addict-2.4": addict.Dict({"lr": 1e-3, "net": {"a": [1, 2, {"x": 1}], "n": None}}),
    }
    for name, value in configurations.items():
        torch.save({"state_dict": weights, "hyper_parameters": value}, FOLDER / f"{name}.ckpt")
    content = TensorDict({"a": torch.rand(3, 4), "b": {"c": torch.rand(3)}}, batch_size=[3])
    torch.save(content, FOLDER / "tensordict-0.15.pt")
    agent = PPO("MlpPolicy", "CartPole-v1", n_steps=16, batch_size=8, policy_kwargs={"net_arch": [8]}, device="cpu")
    agent.learn(16)
    agent.save(FOLDER / "stable-baselines3-2.9.zip")
    sac = SAC("MlpPolicy", "Pendulum-v1", policy_kwargs={"net_arch": [8]}, learning_starts=10, batch_size=4)
    sac.learn(30)
    sac.save(FOLDER / "stable-baselines3-2.9-sac.zip")


if __name__ == "__main__":
    main()
