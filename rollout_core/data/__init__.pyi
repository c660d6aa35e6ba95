from .dataset_sources import (
    import_dataset as import_dataset,
    read_dataset as read_dataset,
    stored_rows as stored_rows,
)
from .datasets import (
    PairRow as PairRow,
    PromptRow as PromptRow,
    Row as Row,
    SftRow as SftRow,
    UnpairedRow as UnpairedRow,
    parse_rows as parse_rows,
    to_jsonl as to_jsonl,
)
from .examples import (
    Example as Example,
    epoch_order as epoch_order,
)
from .packing import (
    Document as Document,
    PackedTokens as PackedTokens,
    pack as pack,
    pack_completions as pack_completions,
)
from .samples import (
    Completion as Completion,
    Failure as Failure,
    Outcome as Outcome,
    Sample as Sample,
    SampledCompletion as SampledCompletion,
    decode_completions_blob as decode_completions_blob,
    decode_samples as decode_samples,
    encode_completion as encode_completion,
    encode_samples as encode_samples,
    make_samples as make_samples,
)
from .tokenized import (
    DataReport as DataReport,
)
from .training_data import (
    sft_form as sft_form,
    training_items as training_items,
)
