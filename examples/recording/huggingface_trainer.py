"""Record Hugging Face's Trainer: `python huggingface_trainer.py run.chain`.

Go on from any step: give `later.chain run.chain@6`.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckpt_recorder import HuggingFaceCallback
from ckpt_training import load

chain, source, first = sys.argv[1], sys.argv[2:], 0
torch.manual_seed(1)
sizes = {"hidden_size": 52, "intermediate_size": 86, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=509, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
if source:
    first = load(source[0], model, optimizer, scheduler=scheduler).step


class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        for tokens in torch.randint(509, (12 * 8, 16), generator=torch.Generator().manual_seed(2))[first * 8 :]:
            yield {"input_ids": tokens, "labels": tokens}


options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "use_cpu": True, "logging_steps": 1}
options |= {"max_steps": 12 - first, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
arguments = TrainingArguments(tempfile.mkdtemp(), **options)
recording = HuggingFaceCallback(chain, step=first)
Trainer(model, arguments, train_dataset=Data(), optimizers=(optimizer, scheduler), callbacks=[recording]).train()
