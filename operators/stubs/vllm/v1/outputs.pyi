class AuxRequestOutput: ...

class ModelRunnerOutput:
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    aux_output_connector_output: dict[str, AuxRequestOutput] | None
