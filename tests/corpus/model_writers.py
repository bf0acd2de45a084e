"""More writers of the corpus: libraries whose checkpoints are directories of models, tokenizers and notes, and formats of one
file that do not say where they end. Everything is made here from a configuration: nothing is fetched."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "##a", "##b"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _twice(directory: Path, name: str, save: Callable[[Path], Any]) -> None:
    """In place, and under a temporary name that becomes the real one."""
    from writers import done

    save(directory / f"{name}-1")
    done(f"{name}-1")
    save(directory / f"{name}-2.tmp")
    os.rename(directory / f"{name}-2.tmp", directory / f"{name}-2")
    done(f"{name}-2")


def _bert(scratch: Path) -> tuple[Any, Any]:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    torch.manual_seed(1)
    scratch.mkdir(exist_ok=True)
    (scratch / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4,
        max_position_embeddings=8,
    )  # fmt: skip
    return BertForSequenceClassification(config), BertTokenizer(str(scratch / "vocab.txt"))


def hf_bert(directory: Path) -> None:
    model, tokenizer = _bert(directory.parent / "made")

    def save(path: Path) -> None:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        # As versions before 5 do; since then the words are in tokenizer.json alone.
        with open(path / "vocab.txt", "w", encoding="utf-8") as file:
            for word in WORDS:
                file.write(word + "\n")

    _twice(directory, "bert", save)


def hf_chat(directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(1)
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    trained.train_from_iterator(["a b ab ba"], trainers.BpeTrainer(vocab_size=20, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, max_position_embeddings=8,
        )
    )  # fmt: skip

    def save(path: Path) -> None:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)

    _twice(directory, "chat", save)


def hf_trainer_bert(directory: Path) -> None:
    """The Trainer with optimizer, schedule and tokenizer."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from writers import done

    class Marking(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            done(f"checkpoint-{state.global_step}")

    model, tokenizer = _bert(directory.parent / "made")
    data = [{"input_ids": torch.tensor([2, 5, 6, 3]), "labels": number % 2} for number in range(8)]
    arguments = TrainingArguments(
        str(directory), per_device_train_batch_size=4, save_steps=2, max_steps=2, logging_steps=100,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[Marking()]).train()


def peft_lora(directory: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    base = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0"]))
    _twice(directory, "adapter", model.save_pretrained)


def diffusers_pipeline(directory: Path) -> None:
    import torch
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    torch.manual_seed(1)
    network = UNet2DModel(
        sample_size=4, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(4,), norm_num_groups=2,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
    )  # fmt: skip
    _twice(directory, "pipeline", DDPMPipeline(network, DDPMScheduler(num_train_timesteps=4)).save_pretrained)


def sentence_transformers(directory: Path) -> None:
    from sentence_transformers import SentenceTransformer, models

    scratch = directory.parent / "made"
    model, tokenizer = _bert(scratch)
    model.base_model.save_pretrained(scratch / "bert")
    tokenizer.save_pretrained(scratch / "bert")
    words = models.Transformer(str(scratch / "bert"), max_seq_length=8)
    whole = SentenceTransformer(modules=[words, models.Pooling(4)], device="cpu")
    _twice(directory, "sentences", lambda path: whole.save(str(path)))


def accelerate_state(directory: Path) -> None:
    import torch
    from accelerate import Accelerator

    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.backward(model(torch.rand(2, 4)).sum())
    optimizer.step()
    _twice(directory, "state", lambda path: accelerator.save_state(str(path)))


def sklearn_joblib(directory: Path) -> None:
    import joblib
    import numpy as np
    from sklearn.linear_model import SGDClassifier
    from writers import done

    values = np.random.default_rng(1).random((20, 4))
    model = SGDClassifier(random_state=1).fit(values, values[:, 0] > 0.5)
    for name in ("model.joblib", "model.pkl", "model.joblib.gz", "model.joblib.xz", "model.z"):
        joblib.dump(model, directory / name)
        done(name)
    joblib.dump(model, directory / "best.joblib.tmp")
    os.rename(directory / "best.joblib.tmp", directory / "best.joblib")
    done("best.joblib")


def _boosters() -> Any:
    import numpy as np

    values = np.random.default_rng(1).random((20, 4))
    return values, (values[:, 0] > 0.5).astype(int)


def _xgboost(directory: Path, names: list[str]) -> None:
    import xgboost
    from writers import done

    values, labels = _boosters()
    model = xgboost.train({"max_depth": 2, "nthread": 1}, xgboost.DMatrix(values, labels), 2)
    for name in names:
        model.save_model(directory / name)
        done(name)


def xgboost_binary(directory: Path) -> None:
    _xgboost(directory, ["step-1.ubj", "step-2.ubj"])


def xgboost_json(directory: Path) -> None:
    _xgboost(directory, ["step-1.json", "step-1.json"])


def lightgbm(directory: Path) -> None:
    import lightgbm as gbm
    from writers import done

    values, labels = _boosters()
    parameters = {"num_leaves": 3, "verbose": -1, "num_threads": 1, "min_data_in_leaf": 2}
    model = gbm.train(parameters, gbm.Dataset(values, labels), 2)
    for name in ("model.txt", "model.txt"):
        model.save_model(directory / name)
        done(name)


def onnx(directory: Path) -> None:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from writers import done

    weights = numpy_helper.from_array(np.arange(16, dtype=np.float32).reshape(4, 4), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
        [weights],
    )
    for step in (1, 2):
        onnx.save(helper.make_model(graph), str(directory / f"step-{step}.onnx"))
        done(f"step-{step}.onnx")


def flax_msgpack(directory: Path) -> None:
    import numpy as np
    from flax import serialization
    from writers import done

    state = {"weights": np.arange(20, dtype=np.float32), "step": 1}
    for step in (1, 2):
        (directory / f"step-{step}.msgpack").write_bytes(serialization.to_bytes(state))
        done(f"step-{step}.msgpack")


def spacy(directory: Path) -> None:
    import spacy as library

    pipeline = library.blank("xx")
    pipeline.add_pipe("sentencizer")
    _twice(directory, "pipeline", pipeline.to_disk)


def texts(directory: Path) -> None:
    """What scripts keep beside their weights, in files of their own format."""
    import configparser
    import csv
    import json

    import tomli_w
    import yaml

    settings = {"model": {"width": 4, "layers": [1, 2]}}

    def save(path: Path) -> None:
        path.mkdir()
        with open(path / "weights.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["[0]", 0.5], ["[1]", 0.25]])
        (path / "settings.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
        (path / "settings.yaml").write_text(
            yaml.safe_dump(settings, default_flow_style=True), encoding="utf-8"
        )
        parser = configparser.ConfigParser()
        parser["model"] = {"width": "4"}
        with open(path / "settings.ini", "w", encoding="utf-8") as file:
            parser.write(file)
        (path / "prompt.jinja").write_text(TEMPLATE, encoding="utf-8")
        (path / "train.log").write_text("[2026-01-01 00:00:00] step 1\n", encoding="utf-8")
        (path / "README.md").write_text("[![badge](x)](y)\n\n# A model\n", encoding="utf-8")
        (path / "history.jsonl").write_text('{"step": 1}\n{"step": 2}\n', encoding="utf-8")
        (path / "settings.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
        for protocol in range(6):
            with open(path / f"state-{protocol}.pkl", "wb") as file:
                pickle.dump({"step": 1, "weights": [0.5] * 50}, file, protocol)

    _twice(directory, "run", save)


WRITERS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        hf_bert, hf_chat, hf_trainer_bert, peft_lora, diffusers_pipeline, sentence_transformers, accelerate_state,
        sklearn_joblib, xgboost_binary, xgboost_json, lightgbm, onnx, flax_msgpack, spacy, texts,
    )
}  # fmt: skip
