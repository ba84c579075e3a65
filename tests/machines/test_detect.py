import pytest

from nearpeak.machines import cgroups, detect

INTEL = """\
processor	: 0
vendor_id	: GenuineIntel
model name	: Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz
flags		: fpu lm sse2 avx avx2 avx512f amx_tile amx_bf16 amx_int8

processor	: 1
vendor_id	: GenuineIntel
model name	: Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz
flags		: fpu lm sse2 avx avx2 avx512f amx_tile amx_bf16 amx_int8
"""


def arm(*parts, features="fp asimd", implementer="0x41"):
    return "\n\n".join(
        f"processor\t: {number}\nFeatures\t: {features}\nCPU implementer\t: {implementer}\nCPU part\t: {part}"
        for number, part in enumerate(parts)
    )


@pytest.fixture
def tree(tmp_path):
    """A function that writes files of a made-up system and returns its root."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def facts(root, cpus):
    return detect.detect_cpu(root, affinity=cpus, system="Linux")


def cache(cpu, index, level, kind, size, shared):
    folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
    return {
        f"{folder}/level": level,
        f"{folder}/type": kind,
        f"{folder}/size": size,
        f"{folder}/shared_cpu_list": shared,
    }


def test_an_x86_machine_with_amx(tree):
    machine = facts(
        tree(
            {
                "proc/cpuinfo": INTEL,
                "proc/meminfo": "MemTotal:       16384 kB\nMemFree:  5 kB\n",
                "sys/devices/system/cpu/cpu0/cpufreq/base_frequency": "2000000\n",
                "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3800000\n",
                **cache(0, 0, "1", "Data", "48K", "0"),
                **cache(0, 1, "1", "Instruction", "32K", "0"),
                **cache(0, 2, "2", "Unified", "2048K", "0"),
                **cache(0, 3, "3", "Unified", "105M", "0-1"),
                **cache(1, 3, "3", "Unified", "105M", "0-1"),
            }
        ),
        [0, 1],
    )
    assert machine.id == "cpu-intel-xeon-platinum-8480plus-2"
    assert machine.name == "Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz"
    assert (machine.kind, machine.vendor, machine.architecture) == ("cpu", "intel", "x86_64")
    assert machine.vector_bits == 512
    assert machine.matrix_engine == "AMX (bf16, int8)"
    assert machine.memory_bytes == 16384 * 1024
    assert machine.cache_levels == {"L1d": 48 * 1024, "L2": 2 * 2**20, "L3": 105 * 2**20}
    assert machine.cache_bytes == 105 * 2**20
    assert (machine.clock_base_hz, machine.clock_boost_hz) == (2.0e9, 3.8e9)
    assert machine.theoretical is None
    assert machine.achievable is None


def test_the_last_level_caches_that_the_process_reaches_add_up(tree):
    files = {"proc/cpuinfo": INTEL}
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        files |= cache(cpu, 3, "3", "Unified", "32768K", shared)
    root = tree(files)
    assert facts(root, [0, 1, 2, 3]).cache_bytes == 64 * 2**20
    assert facts(root, [2, 3]).cache_bytes == 32 * 2**20
    assert facts(root, [0, 2]).cache_levels == {"L3": 32 * 2**20}


@pytest.mark.parametrize(
    ("parts", "implementer", "name", "vendor"),
    [
        (["0xd0c", "0xd0c"], "0x41", "Neoverse-N1", "arm"),
        (["0xd40"], "0x41", "Neoverse-V1", "arm"),
        (["0xd49"], "0x41", "Neoverse-N2", "arm"),
        (["0xd4f"], "0x41", "Neoverse-V2", "arm"),
        (["0xd0b", "0xd08"], "0x41", "Cortex-A76 + Cortex-A72", "arm"),
        (["0x022"], "0x61", "apple part 0x22", "apple"),
        (["0x123"], "0x99", "implementer 0x99 part 0x123", "unknown"),
        (["nonsense"], "0x41", "arm part 0x0", "arm"),
    ],
)
def test_an_arm_cpu_is_named_by_its_id_register(tree, parts, implementer, name, vendor):
    machine = facts(tree({"proc/cpuinfo": arm(*parts, implementer=implementer)}), [0])
    assert (machine.name, machine.vendor, machine.architecture) == (name, vendor, "aarch64")


def test_the_id_is_a_slug_with_the_cores(tree):
    assert facts(tree({"proc/cpuinfo": arm("0xd0c", "0xd0c")}), [0, 1]).id == "cpu-neoverse-n1-2"


@pytest.mark.parametrize(
    ("flags", "bits", "engine"),
    [
        ("sse2", 128, None),
        ("sse2 avx", 256, None),
        ("sse2 avx avx2", 256, None),
        ("sse2 avx avx2 avx512f", 512, None),
        ("fpu", None, None),
        ("avx512f amx_tile", 512, "AMX"),
    ],
)
def test_vector_width_and_matrix_engine_come_from_the_flags(tree, flags, bits, engine):
    machine = facts(tree({"proc/cpuinfo": f"processor : 0\nmodel name : X\nflags : {flags}\n"}), [0])
    assert (machine.vector_bits, machine.matrix_engine) == (bits, engine)


def test_sve_tells_its_own_length(tree):
    root = tree({"proc/cpuinfo": arm("0xd40", features="asimd sve sme")})
    assert facts(root, [0]).vector_bits == 128
    tree({"proc/sys/abi/sve_default_vector_length": "32\n"})
    assert facts(root, [0]).vector_bits == 256
    assert facts(root, [0]).matrix_engine == "SME"


def test_two_hardware_threads_are_one_core(tree):
    files = {"proc/cpuinfo": INTEL}
    for cpu, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings + "\n"
    root = tree(files)
    assert facts(root, [0, 1, 2, 3]).processors == 2
    assert facts(root, [0, 2]).processors == 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "garbage\n"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8,
        ),
    ],
)
def test_the_quota_of_a_container_caps_the_cores(tree, files, cores):
    root = tree({"proc/cpuinfo": INTEL, **files})
    assert facts(root, range(8)).processors == cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1048576"}, 1048576),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max"}, 8 * 2**20),
        ({"proc/self/cgroup": "3:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2097152"}, 2097152),
        (
            {"proc/self/cgroup": "3:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"},
            8 * 2**20,
        ),
    ],
)
def test_the_limit_of_a_container_caps_the_memory(tree, files, expected):
    root = tree({"proc/cpuinfo": INTEL, "proc/meminfo": "MemTotal: 8192 kB\n", **files})
    assert facts(root, [0]).memory_bytes == expected


def test_what_the_system_does_not_tell_is_none(tree):
    machine = facts(tree({"proc/cpuinfo": "processor : 0\n"}), [0])
    assert machine.memory_bytes is None
    assert machine.cache_bytes is None
    assert machine.cache_levels == {}
    assert machine.vector_bits is None
    assert machine.clock_boost_hz is None


def test_limits_without_control_groups_are_none(tmp_path):
    assert cgroups.cpu_limit(tmp_path) is None
    assert cgroups.memory_limit(tmp_path) is None


def test_this_machine_has_a_cpu():
    machine = detect.detect_cpu()
    assert machine.kind == "cpu"
    assert machine.id.startswith("cpu-")
    assert machine.processors >= 1


def test_macos_is_asked_through_sysctl(monkeypatch):
    answers = {
        "machdep.cpu.brand_string": "Apple M3 Max",
        "hw.optional.arm64": "1",
        "hw.physicalcpu": "14",
        "hw.memsize": str(36 * 2**30),
        "hw.perflevel0.l1dcachesize": "131072",
        "hw.perflevel0.l2cachesize": "16777216",
    }
    monkeypatch.setattr(detect, "_sysctl", lambda: answers)
    machine = detect.detect_cpu(system="Darwin")
    assert (machine.id, machine.vendor, machine.architecture) == ("cpu-apple-m3-max-14", "apple", "arm64")
    assert machine.memory_bytes == 36 * 2**30
    assert machine.cache_levels == {"L1d": 131072, "L2": 16777216}
    assert machine.cache_bytes == 16777216
    assert machine.vector_bits == 128


def test_a_system_that_nobody_knows_still_has_a_machine():
    machine = detect.detect_cpu(system="Plan9")
    assert machine.kind == "cpu"
    assert machine.vector_bits is None
