"""Many prompts as one batch: greedy, then sampled with a seed.

python examples/offline_batch.py [MODEL]
"""

import sys

from fusewright import LLM, SamplingParams

PROMPTS = [
    "37+58=",
    "905-46=",
    "sort 5 3 9 1=",
    "reverse kernel=",
    "min 41 7 300=",
    "max 41 7 300=",
]


def main() -> None:
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "abacus", optimization_level=2)

    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=32)):
        completion = output.outputs[0]
        print(f"{output.prompt}{completion.text}  [{completion.finish_reason}]")

    # A request with its own seed repeats itself, whatever runs beside it.
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, n=3, max_tokens=32)
    for output in llm.generate(["37+58="], params):
        print("sampled:", [completion.text for completion in output.outputs])


if __name__ == "__main__":
    main()
