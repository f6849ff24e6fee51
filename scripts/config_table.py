"""The ready configs: their models, their methods, and the ranks that each is launched on.

Names of components, files and repositories are those of torchtune's own configs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

CONFIGS = Path(__file__).parent.parent / "configs"
FOLDER = "adaptive"  # before the names, so that none equals a name of torchtune's

Method: TypeAlias = Literal["full", "lora", "qlora", "full_dpo", "lora_dpo", "KD_lora", "qat_full", "qat_lora"]

RECIPES: Mapping[Method, str] = {
    "full": "full_finetune",
    "lora": "lora_finetune",
    "qlora": "lora_finetune",
    "full_dpo": "full_dpo",
    "lora_dpo": "lora_dpo",
    "KD_lora": "knowledge_distillation",
    "qat_full": "qat",
    "qat_lora": "qat_lora_finetune",
}
TITLES: Mapping[Method, str] = {
    "full": "full finetuning",
    "lora": "LoRA finetuning",
    "qlora": "QLoRA finetuning",
    "full_dpo": "DPO of all weights",
    "lora_dpo": "DPO with LoRA",
    "KD_lora": "distillation with LoRA",
    "qat_full": "quantization-aware training",
    "qat_lora": "quantization-aware training with LoRA",
}


@dataclass(frozen=True)
class Model:
    """A model that torchtune has a builder for, and where its files come from.

    Attributes:
        builder: of torchtune.models, with {} where a builder for LoRA has "lora_".
        source: name at the Hugging Face Hub.
        num_files: of the checkpoint.
        file_format: has {} for the number of a file and {} for the number of files.
        ignored: pattern of files that need not be downloaded.
        is_gated: whether a download needs a token.
        billions: of parameters.
        is_tied: whether the output layer shares the embedding's weights.
    """

    title: str
    builder: str
    source: str
    num_files: int
    model_type: str
    tokenizer: Mapping[str, str]
    billions: float
    lora_rank: int
    lora_lr: str
    full_lr: str
    ignored: str = ""
    is_gated: bool = True
    is_tied: bool = False
    file_format: str = "model-{}-of-{}.safetensors"

    @property
    def folder(self) -> str:
        """Where its files are expected."""
        return f"/tmp/{self.source.rpartition('/')[2]}"

    @property
    def download(self) -> str:
        """The command that downloads them."""
        ignored = f' --ignore-patterns "{self.ignored}"' if self.ignored else ""
        token = " --hf-token <HF_TOKEN>" if self.is_gated else ""
        return f"tune download {self.source} --output-dir {self.folder}{ignored}{token}"


@dataclass(frozen=True)
class Config:
    """A config: how ``model`` is trained by ``method`` on ``ranks`` ranks.

    Attributes:
        name: without ``FOLDER``; torchtune's own name, where it has such a config.
        teacher: of a distillation.
    """

    name: str
    model: Model
    method: Method
    ranks: int
    teacher: Model | None = None

    @property
    def full_name(self) -> str:
        """What ``--config`` takes."""
        return f"{FOLDER}/{self.name}"

    @property
    def recipe(self) -> str:
        """The adaptive recipe for it."""
        return f"adaptive_{RECIPES[self.method]}_{'single_device' if self.ranks == 1 else 'distributed'}"

    @property
    def launch(self) -> str:
        """The command that trains."""
        return f"tune run {self.ranks_option}{self.recipe} --config {self.full_name}"

    @property
    def ranks_option(self) -> str:
        """The option of a command for the number of ranks, with a space after it; nothing for one rank."""
        return "" if self.ranks == 1 else f"--nproc_per_node {self.ranks} "

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained, rather than adapters."""
        return self.method in ("full", "full_dpo", "qat_full")

    @property
    def prefers(self) -> bool:
        """Whether a sample is a pair of answers."""
        return self.method in ("full_dpo", "lora_dpo")

    @property
    def needs_bitsandbytes(self) -> bool:
        """Whether the optimizer's state has 8 bits and may move to the host: one GPU trains larger models only so."""
        return self.method == "full" and self.ranks == 1 and self.model.billions > 1

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return 1024 if self.prefers else 2048

    @property
    def path(self) -> Path:
        """The file that it is written to."""
        return CONFIGS / f"{self.full_name}.yaml"


def _llama_tokenizer(folder: str) -> dict[str, str]:
    path = f"{folder}/original/tokenizer.model"
    return {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": path}


def _llama(version: str, size: str, source: str, **values: Any) -> Model:
    """A Llama 3: they share tokenizer and download."""
    values = {"lora_lr": "3e-4", "full_lr": "2e-5", "model_type": "LLAMA3"} | values
    return Model(
        title=f"Llama {version.replace('_', '.')} {size}",
        builder=f"torchtune.models.llama{version}.{{}}llama{version}_{size.lower()}",
        source=f"meta-llama/{source}",
        tokenizer=_llama_tokenizer(f"/tmp/{source}"),
        **values,
    )


def _qwen(size: str, builder: str, **values: Any) -> Model:
    """A Qwen 2.5: the weights are those of the instruct version."""
    folder = f"/tmp/Qwen2.5-{size}-Instruct"
    return Model(
        title=f"Qwen 2.5 {size}",
        builder=f"torchtune.models.qwen2_5.{{}}qwen2_5_{builder}",
        source=f"Qwen/Qwen2.5-{size}-Instruct",
        model_type="QWEN2",
        tokenizer={
            "_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer",
            "path": f"{folder}/vocab.json",
            "merges_file": f"{folder}/merges.txt",
        },
        lora_lr="3e-4",
        is_gated=False,
        **values,
    )


def _gemma(size: str, num_files: int, billions: float) -> Model:
    """A Gemma 2."""
    source = f"gemma-2-{size.lower()}"
    return Model(
        title=f"Gemma 2 {size}",
        builder=f"torchtune.models.gemma2.{{}}gemma2_{size.lower()}",
        source=f"google/{source}",
        num_files=num_files,
        model_type="GEMMA2",
        tokenizer={"_component_": "torchtune.models.gemma.gemma_tokenizer", "path": f"/tmp/{source}/tokenizer.model"},
        billions=billions,
        lora_rank=64,
        lora_lr="2e-5",
        full_lr="2e-5",
        ignored=f"{source}.gguf",
        is_tied=True,
    )


_ONE_FILE, _ALL_FILES = "original/consolidated.00.pth", "original/consolidated*"
_70B: dict[str, Any] = {"num_files": 30, "billions": 70.6, "lora_rank": 16, "ignored": _ALL_FILES}
MODELS: Mapping[str, Model] = {
    "llama3_1/8B": _llama(
        "3_1", "8B", "Meta-Llama-3.1-8B-Instruct", num_files=4, billions=8.0, lora_rank=8, ignored=_ONE_FILE
    ),
    "llama3_1/70B": _llama("3_1", "70B", "Meta-Llama-3.1-70B-Instruct", **_70B),
    "llama3_2/1B": _llama(
        "3_2",
        "1B",
        "Llama-3.2-1B-Instruct",
        num_files=1,
        billions=1.2,
        lora_rank=64,
        ignored=_ONE_FILE,
        model_type="LLAMA3_2",
        is_tied=True,
    ),
    "llama3_2/3B": _llama(
        "3_2",
        "3B",
        "Llama-3.2-3B-Instruct",
        num_files=2,
        billions=3.2,
        lora_rank=64,
        ignored=_ONE_FILE,
        model_type="LLAMA3_2",
        is_tied=True,
    ),
    "llama3_3/70B": _llama("3_3", "70B", "Llama-3.3-70B-Instruct", **_70B),
    "qwen2_5/0.5B": _qwen("0.5B", "0_5b", num_files=1, billions=0.5, lora_rank=32, full_lr="2e-5", is_tied=True),
    "qwen2_5/1.5B": _qwen(
        "1.5B", "1_5b_instruct", num_files=1, billions=1.5, lora_rank=32, full_lr="2e-5", is_tied=True
    ),
    "qwen2_5/7B": _qwen("7B", "7b_instruct", num_files=4, billions=7.6, lora_rank=8, full_lr="5e-6"),
    "qwen2_5/14B": _qwen("14B", "14b_instruct", num_files=8, billions=14.8, lora_rank=8, full_lr="5e-6"),
    "qwen2_5/32B": _qwen("32B", "32b_instruct", num_files=17, billions=32.8, lora_rank=8, full_lr="5e-6"),
    "gemma2/2B": _gemma("2B", 3, 2.6),
    "gemma2/9B": _gemma("9B", 8, 9.2),
    "gemma2/27B": _gemma("27B", 24, 27.2),
    "mistral/7B": Model(
        title="Mistral 7B",
        builder="torchtune.models.mistral.{}mistral_7b",
        source="mistralai/Mistral-7B-v0.1",
        num_files=2,
        file_format="pytorch_model-{}-of-{}.bin",
        model_type="MISTRAL",
        tokenizer={
            "_component_": "torchtune.models.mistral.mistral_tokenizer",
            "path": "/tmp/Mistral-7B-v0.1/tokenizer.model",
        },
        billions=7.2,
        lora_rank=64,
        lora_lr="2e-5",
        full_lr="5e-6",
        ignored="*.safetensors",
    ),
    "phi4/14B": Model(
        title="Phi 4 14B",
        builder="torchtune.models.phi4.{}phi4_14b",
        source="microsoft/phi-4",
        num_files=6,
        model_type="PHI4",
        tokenizer={
            "_component_": "torchtune.models.phi4.phi4_tokenizer",
            "vocab_path": "/tmp/phi-4/vocab.json",
            "merges_path": "/tmp/phi-4/merges.txt",
        },
        billions=14.7,
        lora_rank=8,
        lora_lr="3e-4",
        full_lr="5e-6",
        is_gated=False,
    ),
}
# The methods of each model, with the ranks of their launch.
_METHODS: Mapping[str, Mapping[Method, tuple[int, ...]]] = {
    "llama3_1/8B": {
        "full": (4, 1),
        "lora": (2, 1),
        "qlora": (1,),
        "full_dpo": (4,),
        "lora_dpo": (2, 1),
        "qat_full": (4,),
        "qat_lora": (2,),
    },
    "llama3_1/70B": {"full": (8,), "lora": (8,)},
    "llama3_2/1B": {"full": (1,), "lora": (1,), "qlora": (1,), "qat_lora": (2,)},
    "llama3_2/3B": {"full": (2, 1), "lora": (2, 1), "qlora": (1,)},
    "llama3_3/70B": {"full": (8,), "lora": (8,), "qlora": (8,)},
    "qwen2_5/0.5B": {"full": (1,)},
    "qwen2_5/1.5B": {"full": (1,), "lora": (1,)},
    "qwen2_5/7B": {"full": (4, 1), "lora": (2, 1), "qlora": (1,)},
    "qwen2_5/14B": {"lora": (1,)},
    "qwen2_5/32B": {"lora": (8,), "qlora": (1,)},
    "gemma2/2B": {"full": (4,), "lora": (1,), "qlora": (1,)},
    "gemma2/9B": {"full": (4,), "lora": (4,), "qlora": (1,)},
    "gemma2/27B": {"full": (8,), "lora": (4,), "qlora": (1,)},
    "mistral/7B": {"full": (4, 1), "lora": (1,), "qlora": (1,)},
    "phi4/14B": {"full": (4, 1), "lora": (1,), "qlora": (1,)},
}


def all_configs() -> list[Config]:
    """Every config that is shipped, model by model."""
    configs = [
        Config(f"{key}_{method}{'_single_device' if ranks == 1 else ''}", MODELS[key], method, ranks)
        for key, methods in _METHODS.items()
        for method, numbers in methods.items()
        for ranks in numbers
    ]
    for name, student, teacher in (
        ("llama3_2/8B_to_1B", "llama3_2/1B", "llama3_1/8B"),
        ("qwen2_5/1.5_to_0.5B", "qwen2_5/0.5B", "qwen2_5/1.5B"),
    ):
        for ranks, where in ((2, "distributed"), (1, "single_device")):
            title = f"{name}_KD_lora_{where}"
            configs.append(Config(title, MODELS[student], "KD_lora", ranks, MODELS[teacher]))
    return configs
