"""However a prompt is cut into chunks, its logits are those of the model in transformers, but for rounding."""

from hicache.bench.exact.plan import TOLERANCE
from hicache.bench.exact.results import Check
from hicache.bench.exact.rig import relative_difference, rigged
from hicache.bench.exact.subject import Subject, random_tokens

_SEED = 3


def check_chunks(subject: Subject) -> Check:
    """All logits of a prompt, for every chunking of the plan and in one piece, against those without a cache."""
    plan = subject.plan
    tokens = random_tokens(plan.chunked, _SEED)
    expected = subject.plain.logits(tokens)
    failures = []
    worst = 0.0
    with rigged(subject) as rig:
        whole = rig.compute(tokens, salt="whole").logits
        found = {"in one piece": whole}
        for chunking in plan.chunkings:
            found[f"in chunks of {chunking}"] = rig.compute(
                tokens, list(plan.cuts(chunking)), salt=str(chunking)
            ).logits
    for how, logits in found.items():
        apart = max(relative_difference(logits, expected), relative_difference(logits, whole))
        worst = max(worst, apart)
        if not apart <= TOLERANCE:
            failures.append(f"{how}: logits differ by {apart:.1e} of the largest; {TOLERANCE:.0e} are allowed")
    return Check.judged("chunks", f"{worst:.1e}", failures, largest_difference=worst, chunkings=len(found))
