"""Run by the engine's own Python: decode token ids greedily with vLLM and print what its speculative counters say.

Standard input: {"model", "prompts": [[ids]], "max_tokens", "max_model_len", "speculative": {...} or null}. Last line of the
output: RESULT and {"answers": [[ids]], "drafts", "accepted_per_position": [counts]}.
"""

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.load(sys.stdin)
    extra = {"speculative_config": job["speculative"]} if job["speculative"] else {}
    engine = LLM(model=job["model"], dtype="float32", max_model_len=job["max_model_len"], max_num_seqs=1, enforce_eager=True,
                 disable_log_stats=False, **extra)  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=job["max_tokens"]), use_tqdm=False)
    counters = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in engine.get_metrics()}
    result = {"answers": [list(output.outputs[0].token_ids) for output in outputs], "drafts": 0, "accepted_per_position": []}
    if job["speculative"]:
        result["drafts"] = counters["num_drafts"].value
        result["accepted_per_position"] = list(counters["num_accepted_tokens_per_pos"].values)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
