from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata

class GrammarOutput: ...

class SchedulerOutput:
    total_num_scheduled_tokens: int
    aux_output_connector_metadata: AuxOutputConnectorMetadata | None
