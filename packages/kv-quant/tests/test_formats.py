from importlib.metadata import entry_points

import pytest
import torch

from fitted_cases import fitted, written
from kv_policy import (
    CacheShape,
    Formats,
    KVPolicy,
    NotCalibratedError,
    PageLayout,
    TokenFormat,
    parse,
    read_formats,
)
from kv_policy.testing import check_policy
from kv_quant import (
    BlockFloatCodec,
    ChannelCodec,
    CodebookCodec,
    IntegerCodec,
    IntegerFormat,
    LevelsCodec,
    OutlierCodec,
    RowsCodec,
    formats,
)

BITS = (8, 4, 3, 2, 1)
PAIRS = [(key, value) for key in BITS for value in BITS]
INTEGER = {f"k{key}v{value}": getattr(formats, f"K{key}V{value}") for key, value in PAIRS}
RAW = {"bf16": formats.BF16, "fp16": formats.FP16, "fp32": formats.FP32}

KEY = torch.tensor([[[-1.5, 0.25, 0.5, 3.0, -0.125, 2.75]]])
VALUE = torch.tensor([[[1.0, -2.0, 0.5, 0.75, 4.0]]])

# Bytes of KEY and of VALUE; stored pages may outlive the program, so these never change.
# By hand, k4: the zero -1.5 is be00; 4.5 / 15 rounds up to 0.300048828125, 34cd; the codes are
# 0 6 7 15 5 14, and byte i holds those of dimensions i (low) and i + 3 (high): f0 56 e7.
GOLDEN = {
    "k8v8": "006371ff4ef1 8524 00be | 7f006a75ff 0726 00c0",
    "k8v4": "006371ff4ef1 8524 00be | 77f006 6736 00c0",
    "k8v2": "006371ff4ef1 8524 00be | 3604 0040 00c0",
    "k8v1": "006371ff4ef1 8524 00be | 10 0046 00c0",
    "k4v8": "f056e7 cd34 00be | 7f006a75ff 0726 00c0",
    "k4v4": "f056e7 cd34 00be | 77f006 6736 00c0",
    "k4v2": "f056e7 cd34 00be | 3604 0040 00c0",
    "k4v1": "f056e7 cd34 00be | 10 0046 00c0",
    "k2v8": "143d 003e 00be | 7f006a75ff 0726 00c0",
    "k2v4": "143d 003e 00be | 77f006 6736 00c0",
    "k2v2": "143d 003e 00be | 3604 0040 00c0",
    "k2v1": "143d 003e 00be | 10 0046 00c0",
    "k1v8": "28 8044 00be | 7f006a75ff 0726 00c0",
    "k1v4": "28 8044 00be | 77f006 6736 00c0",
    "k1v2": "28 8044 00be | 3604 0040 00c0",
    "k1v1": "28 8044 00be | 10 0046 00c0",
    # By hand, k3: 4.5 / 7 rounds up to 0.64306640625, 3925; the codes are 0 3 3 7 2 7, whose low
    # two bits are in 2c 3f and whose high ones in 28.
    "k8v3": "006371ff4ef1 8524 00be | 3f0c10 dc3a 00c0",
    "k4v3": "f056e7 cd34 00be | 3f0c10 dc3a 00c0",
    "k3v8": "2c3f28 2539 00be | 7f006a75ff 0726 00c0",
    "k3v4": "2c3f28 2539 00be | 77f006 6736 00c0",
    "k3v3": "2c3f28 2539 00be | 3f0c10 dc3a 00c0",
    "k3v2": "2c3f28 2539 00be | 3604 0040 00c0",
    "k3v1": "2c3f28 2539 00be | 10 0046 00c0",
    "k2v3": "143d 003e 00be | 3f0c10 dc3a 00c0",
    "k1v3": "28 8044 00be | 3f0c10 dc3a 00c0",
    "bf16": "c0bf803e003f404000be3040 | 803f00c0003f403f8040",
    "fp16": "00be00340038004200b08041 | 003c00c00038003a0044",
    "fp32": "0000c0bf0000803e0000003f00004040000000be00003040"
    "|0000803f000000c00000003f0000403f00008040",
}
# With groups of 4: all scales, then all zeros; VALUE's last group is a single, flat element.
GOLDEN_GROUPS = {
    "k8v8": "006371ff00ff 8524c621 00be00b0 | ff00d4ea00 07220000 00c00044",
    "k4v4": "f006f7 cd342332 00be00b0 | ef000c 67320000 00c00044",
    "k2v2": "043d 003eab3b 00be00b0 | 0b0c 003c0000 00c00044",
    "k1v1": "28 8044c041 00be00b0 | 0d 00420000 00c00044",
}

BYTES_AT_64 = {"k8v8": 136, "k8v4": 104, "k4v8": 104, "k4v4": 72, "k4v2": 56, "k4v1": 48}
BYTES_AT_64 |= {"k4v3": 64, "k3v3": 56, "k4v4:levels=normal": 68, "k3v3:levels=normal": 52}
BYTES_AT_64 |= {"k4v4:outliers=1": 78, "k3v3:outliers=2": 68, "k4v4:levels=normal,outliers=1": 74}
BYTES_AT_64 |= {"k8v8:levels=bfp,group=32": 132, "k4v4:levels=bfp,group=16": 72}
BYTES_AT_64 |= {"k2v2": 40, "k1v1": 24, "bf16": 256, "fp16": 256, "fp32": 512}


def shape(key_dim: int = 64, value_dim: int = 64) -> CacheShape:
    return CacheShape(layers=2, kv_heads=3, group=2, key_dim=key_dim, value_dim=value_dim)


def stored(tier: TokenFormat) -> str:
    parts = tier.key.encode(KEY)[0].tolist(), tier.value.encode(VALUE)[0].tolist()
    return "|".join(bytes(part).hex() for part in parts)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    part = (INTEGER | RAW)[name]()
    (tier,) = part.bind(shape(6, 5))
    assert stored(tier) == GOLDEN[name].replace(" ", "")


@pytest.mark.parametrize("name", GOLDEN_GROUPS)
def test_golden_bytes_of_groups(name):
    (tier,) = INTEGER[name](group=4).bind(shape(6, 5))
    assert stored(tier) == GOLDEN_GROUPS[name].replace(" ", "")


@pytest.mark.parametrize(("name", "nbytes"), BYTES_AT_64.items())
def test_bytes_of_a_token_of_64_dimensions(name, nbytes):
    (tier,) = parse(name).formats.bind(shape())
    assert tier.nbytes == nbytes
    assert PageLayout.sized(tier, tokens=16).nbytes == 16 * nbytes
    assert tier.key.encode(torch.zeros(3, 1, 64)).shape[1] == sum(tier.key.parts)
    assert tier.value.encode(torch.zeros(3, 1, 64)).shape[1] == sum(tier.value.parts)


@pytest.mark.parametrize("name", INTEGER)
def test_a_format_is_what_its_name_says(name):
    part = INTEGER[name](group=16, window=8)
    assert isinstance(part, IntegerFormat)
    assert isinstance(part, KVPolicy)
    assert isinstance(part, Formats)
    (tier,) = part.bind(shape(64, 48))
    assert tier.key == IntegerCodec(64, int(name[1]), 16)
    assert tier.value == IntegerCodec(48, int(name[3]), 16)
    assert (part.window, part.tiers, part.selector, part.basis) == (8, 1, None, None)
    assert "LeanKV" in part.source
    assert part.__doc__


@pytest.mark.parametrize("name", INTEGER)
def test_keys_per_channel_come_in_blocks(name):
    part = INTEGER[name](group=16, keys="channel", block=8)
    (tier,) = part.bind(shape(64, 48))
    assert tier.key == ChannelCodec(64, int(name[1]), 8)
    assert tier.value == RowsCodec(IntegerCodec(48, int(name[3]), 16), 8)
    assert tier.block == 8


@pytest.mark.parametrize("name", ["k4v4", "k4v3", "k3v3", "k2v1"])
def test_levels_of_a_codebook_are_for_keys_and_values(name):
    part = parse(f"{name}:levels=normal")
    (tier,) = part.formats.bind(shape(64, 48))
    assert tier.key == CodebookCodec(64, int(name[1]))
    assert tier.value == CodebookCodec(48, int(name[3]))
    assert part.capabilities.shares_prefixes
    assert str(part) == f"{name}:levels=normal"


@pytest.mark.parametrize("outliers", [0, 2])
@pytest.mark.parametrize("name", ["k4v4", "k4v3", "k3v3", "k2v1"])
def test_fitted_levels_are_those_of_the_file(name, outliers, tmp_path):
    file = written(tmp_path)
    more = f",outliers={outliers}" if outliers else ""
    part = parse(f"{name}:levels=fitted{more},file={file}")
    (tier,) = part.formats.bind(shape(64, 48))
    keys, values = (fitted().of(int(name[i]), outliers) for i in (1, 3))
    codecs = (
        LevelsCodec(64, int(name[1]), keys.keys),
        LevelsCodec(48, int(name[3]), values.values),
    )
    if outliers:
        codecs = tuple(OutlierCodec(each, outliers) for each in codecs)
    assert (tier.key, tier.value) == codecs
    assert tier.digest == f"{tier.key.digest} {tier.value.digest}"
    assert part.fitted_to == "0123456789abcdef"
    assert part.capabilities.shares_prefixes
    assert str(part) == f"{name}:levels=fitted{more},file={file}"
    check_policy(part)
    even = parse(f"{name}:outliers={outliers}")
    assert even.formats.bind(shape())[0].nbytes == part.formats.bind(shape())[0].nbytes
    assert even.formats.bind(shape())[0].digest is None
    assert even.fitted_to is None


def test_files_of_levels_that_do_not_fit_are_refused(tmp_path):
    file = written(tmp_path)
    for text, message in (
        ("k4v4:levels=fitted", "levels=fitted is refused with file=None: fitted levels are in a"),
        (f"k4v4:file={file}", f"levels=even is refused with file={file}: fitted levels are in a"),
        (f"k4v4:levels=normal,file={file}", "levels=normal is refused with file="),
        (f"k8v4:levels=fitted,file={file}", "there are codebooks of 4, 3, 2 and 1 bits, and none"),
        (f"k4v4:levels=fitted,group=8,file={file}", "levels=fitted is refused with group=8"),
        (f"k4v4:levels=fitted,keys=channel,file={file}", "is refused with keys=channel"),
        (
            f"k4v4:levels=fitted,outliers=1,file={file}",
            "of 4 and 4 bits beside these numbers of outliers: 0, 2; use one of them, or calibrate",
        ),
        (f"k4v4:levels=fitted,file={tmp_path}", "k4v4: .* is a directory; name a file of levels"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(text)
    with pytest.raises(NotCalibratedError, match="kv-serve calibrate levels --model MODEL --out"):
        parse(f"k4v4:levels=fitted,file={tmp_path / 'none'}")
    with pytest.raises(ValueError, match="is fitted to a model, and formats of tiers are for any"):
        read_formats(f"k4v4:levels=fitted,file={file}")


@pytest.mark.parametrize("name", ["k8v4", "k4v4", "k3v2"])
def test_mantissas_share_exponents_in_groups(name):
    part = parse(f"{name}:group=16,levels=bfp")
    (tier,) = part.formats.bind(shape(64, 48))
    assert tier.key == BlockFloatCodec(64, int(name[1]), 16)
    assert tier.value == BlockFloatCodec(48, int(name[3]), 16)
    assert part.capabilities.shares_prefixes
    assert str(part) == f"{name}:group=16,levels=bfp"


@pytest.mark.parametrize("name", ["k8v4", "k4v4", "k3v3", "k2v1"])
def test_outliers_are_apart_in_keys_and_in_values(name):
    part = parse(f"{name}:group=16,outliers=2")
    (tier,) = part.formats.bind(shape(64, 48))
    assert tier.key == OutlierCodec(IntegerCodec(64, int(name[1]), 16), 2)
    assert tier.value == OutlierCodec(IntegerCodec(48, int(name[3]), 16), 2)
    assert part.capabilities.shares_prefixes
    assert part.capabilities.rolls_back
    assert str(part) == f"{name}:group=16,outliers=2"


def test_one_element_at_least_is_no_outlier():
    (tier,) = formats.K4V4(outliers=3).bind(shape(1, 2))
    assert tier.key == IntegerCodec(1, 4)
    assert tier.value == OutlierCodec(IntegerCodec(2, 4), 1)


def test_bytes_of_a_token_with_keys_per_channel():
    (tier,) = parse("k4v4:keys=channel").formats.bind(shape())
    assert tier.nbytes == 32 * 76
    assert PageLayout.sized(tier, tokens=64).nbytes == 64 * 76


@pytest.mark.parametrize(
    "policy",
    [
        formats.K8V4(),
        formats.K4V2(group=32, window=64),
        formats.K1V8(group=7),
        formats.K4V4(keys="channel"),
        formats.K2V1(group=5, window=3, keys="channel", block=3),
        formats.K3V3(group=7),
        formats.K3V3(keys="channel", block=5),
        formats.K4V4(levels="normal"),
        formats.K3V2(levels="normal", window=4),
        formats.K4V4(levels="bfp"),
        formats.K8V3(levels="bfp", group=7, outliers=1),
        formats.K4V4(outliers=1),
        formats.K3V3(outliers=2, levels="normal"),
        formats.K8V4(outliers=1, group=5, window=3),
    ],
)
def test_the_contract_holds(policy):
    check_policy(policy)


def test_every_format_is_registered():
    ours = {e.name: e.value for e in entry_points(group="kv_policy") if "kv_quant" in e.value}
    assert ours == {name: f"kv_quant.formats:{name.upper()}" for name in INTEGER | RAW}


@pytest.mark.parametrize("name", [*INTEGER, *RAW])
def test_text_form(name):
    assert parse(name) == (INTEGER | RAW)[name]()
    assert str(parse(name)) == name


def test_parameters_in_text():
    policy = parse("k4v2:window=64,group=32")
    assert policy == formats.K4V2(group=32, window=64)
    assert str(policy) == "k4v2:group=32,window=64"
    assert policy != formats.K4V4(group=32, window=64)
    policy = parse("k4v4:keys=channel,block=16")
    assert policy == formats.K4V4(keys="channel", block=16)
    assert str(policy) == "k4v4:keys=channel,block=16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k8v4:window=-1", "k8v4: window=-1 is refused"),
        ("k8v4:group=-3", "k8v4: group=-3 is refused"),
        ("k8v4:group=half", "k8v4: group=half is refused"),
        ("k8v4:bits=4", "k8v4 has no parameter 'bits'; its parameters: group, window, keys, block"),
        ("k4v4:levels=odd", "k4v4: levels=odd is refused"),
        ("k8v4:levels=normal", "there are codebooks of 4, 3, 2 and 1 bits, and none of 8"),
        ("k4v4:levels=normal,group=8", "levels=normal is refused with group=8"),
        ("k4v4:levels=bfp,keys=channel", "levels=bfp is refused with keys=channel"),
        ("k4v1:levels=bfp", "there are mantissas of 8, 4, 3 and 2 bits, and none of 1"),
        ("k4v4:levels=normal,keys=channel", "levels=normal is refused with keys=channel"),
        ("k4v4:outliers=-1", "k4v4: outliers=-1 is refused"),
        ("k4v4:outliers=1,keys=channel", "outliers=1 is refused with keys=channel"),
        ("k8v4:keys=head", "k8v4: keys=head is refused"),
        ("k8v4:keys=channel,block=1", "k8v4: block=1 is refused"),
        ("k8v4:block=16", "k8v4: block=16 is refused: keys with a scale per token have no block"),
        ("bf16:window=4", "bf16 has no parameter 'window'"),
        ("k8v4+k4v2", "both define how tokens are stored"),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_a_raw_window_keeps_a_prefix_from_being_shared():
    assert formats.K8V4().capabilities.shares_prefixes
    assert not formats.K8V4(window=64).capabilities.shares_prefixes
    assert formats.K8V4(window=64).capabilities.rolls_back


def test_a_block_can_be_neither_shared_nor_cut():
    able = formats.K8V4(keys="channel").capabilities
    assert not able.shares_prefixes
    assert not able.rolls_back


def test_more_bits_are_closer():
    x = torch.randn(100, 1, 64)
    errors = []
    for bits in BITS:
        codec = IntegerCodec(64, bits)
        errors.append((codec.decode(codec.encode(x)) - x).square().mean().item())
    assert errors == sorted(errors)


@pytest.mark.parametrize("name", RAW)
def test_raw_formats_keep_their_own_dtype_exactly(name):
    (tier,) = RAW[name]().bind(shape())
    x = torch.randn(20, 1, 64).to(RAW[name].dtype)
    assert torch.equal(tier.key.decode(tier.key.encode(x)), x)
