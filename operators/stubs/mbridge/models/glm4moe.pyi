from typing import Any

from mbridge.core.llm_bridge import LLMBridge

class GLM4MoEBridge(LLMBridge):
    def _get_gptmodel_args(self) -> dict[str, Any]: ...
