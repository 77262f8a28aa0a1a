"""Every family that this engine runs."""

from ridgeline.models.families.cohere import COHERE, COHERE2
from ridgeline.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MINICPM3
from ridgeline.models.families.exaone import EXAONE4
from ridgeline.models.families.gemma import GEMMA2, GEMMA3
from ridgeline.models.families.glm import GLM, GLM4, GLM4_MOE
from ridgeline.models.families.gpt_oss import GPT_OSS
from ridgeline.models.families.granite import GRANITE, GRANITE_MOE
from ridgeline.models.families.llama import ARCEE, ERNIE, LLAMA, SEED_OSS, SMOLLM3
from ridgeline.models.families.mistral import MISTRAL, MIXTRAL
from ridgeline.models.families.nemotron import NEMOTRON
from ridgeline.models.families.olmo import OLMO2, OLMO3, OLMOE
from ridgeline.models.families.phi3 import PHI3
from ridgeline.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from ridgeline.models.families.starcoder2 import STARCODER2

FAMILIES = (
    LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA2, GEMMA3, SMOLLM3, SEED_OSS, ERNIE, ARCEE, OLMO2, OLMO3, GRANITE, GLM, GLM4, COHERE,
    COHERE2, STARCODER2, EXAONE4, NEMOTRON, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GLM4_MOE,
    GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MINICPM3,
)
