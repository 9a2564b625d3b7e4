// libnvidia-ml.so.1 for one made-up GPU. FAKE_NVML says how it fails, FAKE_NVML_AFTER after how many looks at its energy.
// Compiled with -DOLD it lacks a call that drivers did not always have.
//
// It draws 10 W at rest; what burn() adds comes on top. Its energy counter is computed when it is asked, so that it is
// exact at any moment. Signatures: nvml.h of the NVML API reference.

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {

enum {
    SUCCESS = 0,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    LIBRARY_NOT_FOUND = 12,
    GPU_IS_LOST = 15
};

constexpr double IDLE_W = 10, BUSY_W = 310;
int device = 0, slices[2] = {0, 0};
long looks = 0;
double burned_mj = 0, burned_at_s = -1;

double now_s() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

const double started_s = now_s();

bool mode(const char *name) {
    const char *chosen = std::getenv("FAKE_NVML");
    return chosen && !std::strcmp(chosen, name);
}

bool late() {
    const char *after = std::getenv("FAKE_NVML_AFTER");
    return looks > (after ? std::atol(after) : 0);
}

int gone() { return mode("lost") && late() ? GPU_IS_LOST : SUCCESS; }

template <class T> int tell(T *place, T value) {
    if (int error = gone()) return error;
    *place = value;
    return SUCCESS;
}

int say(char *place, unsigned length, const char *text) {
    std::strncpy(place, text, length);
    return SUCCESS;
}

}  // namespace

extern "C" {

struct Memory { unsigned long long total, free, used; };
struct Utilization { unsigned gpu, memory; };
struct Violation { unsigned long long reference_us, violation_ns; };
struct Process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };

void burn(double millijoules) {
    burned_mj += millijoules;
    burned_at_s = now_s();
}

int nvmlInitWithFlags(unsigned) {
    return mode("not_loaded") ? DRIVER_NOT_LOADED : mode("absent") ? LIBRARY_NOT_FOUND : SUCCESS;
}
int nvmlShutdown() { return SUCCESS; }
const char *nvmlErrorString(int) { return "an error of the made-up driver"; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) { return say(version, length, "570.1"); }
int nvmlDeviceGetCount_v2(unsigned *count) { return tell(count, 1u); }
int nvmlDeviceGetHandleByIndex_v2(unsigned, void **handle) { return tell(handle, (void *)&device); }
// In the mode "mig" the GPU is divided: slices have the numbers 0 and 2, and know nothing but what is their own.
int nvmlDeviceGetMigMode(void *, unsigned *now, unsigned *later) {
    *later = mode("mig");
    return tell(now, mode("mig") ? 1u : 0u);
}
int nvmlDeviceGetMaxMigDeviceCount(void *, unsigned *count) { return tell(count, 7u); }
int nvmlDeviceGetMigDeviceHandleByIndex(void *, unsigned number, void **handle) {
    return number == 0 || number == 2 ? tell(handle, (void *)&slices[number / 2]) : NOT_FOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *, void **handle) { return tell(handle, (void *)&device); }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    for (int number : {0, 2})
        if (mode("mig") && !std::strncmp(uuid, "MIG-made-up-", 12) && uuid[12] == '0' + number)
            return tell(handle, (void *)&slices[number / 2]);
    return std::strcmp(uuid, "GPU-made-up") ? NOT_FOUND : tell(handle, (void *)&device);
}
int nvmlDeviceGetName(void *asked, char *name, unsigned length) {
    return say(name, length, asked == &device ? "NVIDIA Made-up" : "NVIDIA Made-up MIG 1g.1gb");
}
int nvmlDeviceGetUUID(void *asked, char *uuid, unsigned length) {
    return say(uuid, length, asked == &device ? "GPU-made-up" : asked == &slices[0] ? "MIG-made-up-0" : "MIG-made-up-2");
}
int nvmlDeviceGetCudaComputeCapability(void *asked, int *major, int *minor) {
    if (asked != &device) return NOT_SUPPORTED;
    *major = 9;
    return tell(minor, 0);
}
int nvmlDeviceGetMemoryInfo(void *asked, Memory *memory) {
    unsigned long long gib = asked == &device ? 8 : 1;
    return tell(memory, Memory{gib << 30, (gib << 30) * 3 / 4, (gib << 30) / 4});
}
int nvmlDeviceGetClockInfo(void *asked, int kind, unsigned *mhz) {
    if (asked != &device) return NOT_SUPPORTED;
    return tell(mhz, kind == 1 ? 1500u : 2600u);
}
int nvmlDeviceGetTemperature(void *, int, unsigned *celsius) { return tell(celsius, 55u); }
int nvmlDeviceGetEnforcedPowerLimit(void *, unsigned *milliwatts) { return tell(milliwatts, 700000u); }
int nvmlDeviceGetViolationStatus(void *, int policy, Violation *status) {
    return tell(status, Violation{0, policy == 1 ? 2500000000ull : 1000000000ull});  // heat, else the power limit
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *, unsigned long long *bits) { return tell(bits, 0x4ull | 0x40ull); }

#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(void *, unsigned *count, Process *processes) {
    bool fits = *count >= 1;
    if (fits) processes[0] = Process{4242, 1ull << 30, 0, 0};
    int error = tell(count, 1u);
    return error ? error : fits ? SUCCESS : INSUFFICIENT_SIZE;
}
#endif

int nvmlDeviceGetUtilizationRates(void *, Utilization *rates) {
    looks++;
    if (mode("refuses")) return NO_PERMISSION;
    return tell(rates, Utilization{now_s() - burned_at_s < 0.1 ? 80u : 0u, 0});
}

int nvmlDeviceGetPowerUsage(void *, unsigned *milliwatts) {
    looks++;
    if (mode("refuses")) return NO_PERMISSION;
    return tell(milliwatts, unsigned((now_s() - burned_at_s < 0.1 ? BUSY_W : IDLE_W) * 1e3));
}

int nvmlDeviceGetTotalEnergyConsumption(void *, unsigned long long *millijoules) {
    looks++;
    if (mode("refuses")) return NO_PERMISSION;
    if (mode("no_counter")) return NOT_SUPPORTED;
    double total = 1e9 + IDLE_W * 1e3 * (now_s() - started_s) + burned_mj;
    if (mode("still")) total = 1e9;
    if (mode("falls") && late()) total -= 5e8;
    if (mode("jumps") && late()) total += 5e8;
    return tell(millijoules, (unsigned long long)total);
}
}
