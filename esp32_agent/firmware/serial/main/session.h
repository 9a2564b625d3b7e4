// The firmware's side of the serial protocol: bytes come in, lines of JSON go out. It knows neither the chip nor TFLite.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "request.h"
#include "statistics.h"

namespace optigpu {

constexpr int kProtocolVersion = 1;
constexpr size_t kLongestLine = 1024;
constexpr size_t kMostOutput = 256;  // bytes in one answer
constexpr uint32_t kMostCount = 1000000;

// What the session runs. Invoke returns nullptr, or what went wrong.
class Model {
public:
    virtual ~Model() = default;
    virtual size_t input_bytes() const = 0;
    virtual size_t output_bytes() const = 0;
    virtual uint8_t *input() = 0;  // a buffer that inferences leave alone
    virtual const uint8_t *output() const = 0;
    virtual const char *Invoke(uint64_t &us) = 0;  // us: of the inference alone, the copy of the input left out
};

// What the firmware says of itself; texts hold neither quotes nor backslashes.
struct Description {
    const char *version;
    const char *chip;
    const char *reset_reason;
    const char *model_sha256;
    const char *firmware_sha256;
    uint32_t clock_hz;
    uint32_t arena_bytes;
    bool psram;
};

class Port {
public:
    virtual ~Port() = default;
    virtual void Write(const char *text, size_t length) = 0;
    virtual uint32_t HeapFree() const = 0;
};

// CRC-32 of zlib, a bit at a time: an input of 27 KB takes some 10 ms, outside of every measurement.
inline uint32_t Crc32(const uint8_t *data, size_t length) {
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < length; ++i) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
        }
    }
    return ~crc;
}

class Session {
public:
    Session(Model &model, Port &port, const Description &description)
        : model_(model), port_(port), description_(description) {}

    // The line that tells a host of a restart.
    void Begin() { Print("{\"ready\":\"optigpu-serial\",\"protocol\":%d}", kProtocolVersion); }

    void Receive(char byte) {
        if (byte == '\n' || byte == '\r') {
            if (too_long_) {
                Error(0, "The line is too long.");
            } else if (length_ > 0) {
                Answer();
            }
            length_ = 0;
            too_long_ = false;
        } else if (length_ < kLongestLine) {
            line_[length_++] = byte;
        } else {
            too_long_ = true;
        }
    }

private:
    void Answer() {
        Request request;
        if (!RequestReader(line_, length_).Read(request) || request.id == 0) {
            Error(0, "The line is not a request.");
        } else if (std::strcmp(request.verb, "info") == 0) {
            Info(request);
        } else if (std::strcmp(request.verb, "input") == 0) {
            Input(request);
        } else if (std::strcmp(request.verb, "invoke") == 0) {
            Invoke(request);
        } else if (std::strcmp(request.verb, "output") == 0) {
            Output(request);
        } else if (std::strcmp(request.verb, "measure") == 0) {
            Measure(request);
        } else {
            Error(request.id, "There is no such command: info, input, invoke, output, measure.");
        }
    }

    void Info(const Request &request) {
        const Description &own = description_;
        Print("{\"id\":%lu,\"version\":\"%s\",\"chip\":\"%s\",\"clock_hz\":%lu,\"reset_reason\":\"%s\",\"heap_free\":%lu,"
              "\"firmware_sha256\":\"%s\",\"model_sha256\":\"%s\",\"arena_bytes\":%lu,\"psram\":%s,\"input_bytes\":%lu,"
              "\"output_bytes\":%lu}",
              Long(request.id), own.version, own.chip, Long(own.clock_hz), own.reset_reason, Long(port_.HeapFree()),
              own.firmware_sha256, own.model_sha256, Long(own.arena_bytes), own.psram ? "true" : "false",
              Long(model_.input_bytes()), Long(model_.output_bytes()));
    }

    void Input(const Request &request) {
        const size_t count = request.data_length / 2;
        if (request.data_length % 2 != 0 || request.offset > model_.input_bytes() ||
            count > model_.input_bytes() - request.offset) {
            Error(request.id, "The data reaches beyond the input.");
            return;
        }
        for (size_t i = 0; i < count; ++i) {
            const int high = Digit(request.data[2 * i]);
            const int low = Digit(request.data[2 * i + 1]);
            if (high < 0 || low < 0) {
                Error(request.id, "The data is not hexadecimal.");
                return;
            }
            model_.input()[request.offset + i] = static_cast<uint8_t>(high << 4 | low);
        }
        Print("{\"id\":%lu,\"filled\":%lu}", Long(request.id), Long(count));
    }

    void Invoke(const Request &request) {
        uint64_t us = 0;
        if (const char *reason = model_.Invoke(us)) {
            Error(request.id, reason);
            return;
        }
        Print("{\"id\":%lu,\"us\":%llu,\"input_crc\":%lu}", Long(request.id), static_cast<unsigned long long>(us),
              Long(Crc32(model_.input(), model_.input_bytes())));
    }

    void Output(const Request &request) {
        const size_t bytes = model_.output_bytes();
        if (request.size > kMostOutput || request.offset > bytes || request.size > bytes - request.offset) {
            Error(request.id, "There are no such bytes of the output.");
            return;
        }
        char hex[2 * kMostOutput + 1];
        for (size_t i = 0; i < request.size; ++i) {
            std::snprintf(hex + 2 * i, 3, "%02x", static_cast<unsigned>(model_.output()[request.offset + i]));
        }
        hex[2 * request.size] = '\0';
        Print("{\"id\":%lu,\"data\":\"%s\",\"crc\":%lu}", Long(request.id), hex, Long(Crc32(model_.output(), bytes)));
    }

    void Measure(const Request &request) {
        if (request.count == 0 || request.count > kMostCount || request.warmup > kMostCount) {
            Error(request.id, "The count must be 1 to 1000000, and the warm-up at most that.");
            return;
        }
        statistics_.Clear();
        for (uint32_t i = 0; i < request.warmup + request.count; ++i) {
            uint64_t us = 0;
            if (const char *reason = model_.Invoke(us)) {
                Error(request.id, reason);
                return;
            }
            if (i >= request.warmup) {
                statistics_.Add(us > UINT32_MAX ? UINT32_MAX : static_cast<uint32_t>(us));
            }
        }
        char p50[24], p90[24], p99[24];
        Print("{\"id\":%lu,\"count\":%lu,\"total_us\":%llu,\"min_us\":%lu,\"p50_us\":%s,\"p90_us\":%s,\"p99_us\":%s}",
              Long(request.id), Long(statistics_.count()), static_cast<unsigned long long>(statistics_.total_us()),
              Long(statistics_.min_us()), Percentile(p50, 50, kFewestP50), Percentile(p90, 90, kFewestP90),
              Percentile(p99, 99, kFewestP99));
    }

    const char *Percentile(char (&text)[24], uint32_t percent, uint32_t fewest) const {
        const int64_t us = statistics_.Percentile(percent, fewest);
        if (us < 0) {
            return "null";
        }
        std::snprintf(text, sizeof(text), "%lld", static_cast<long long>(us));
        return text;
    }

    void Error(uint32_t id, const char *sentence) {
        Print("{\"id\":%lu,\"error\":\"%s\"}", Long(id), sentence);
    }

    static unsigned long Long(size_t value) { return static_cast<unsigned long>(value); }

    static int Digit(char digit) {
        if (digit >= '0' && digit <= '9') {
            return digit - '0';
        }
        if (digit >= 'a' && digit <= 'f') {
            return digit - 'a' + 10;
        }
        return digit >= 'A' && digit <= 'F' ? digit - 'A' + 10 : -1;
    }

    __attribute__((format(printf, 2, 3))) void Print(const char *format, ...) {
        va_list arguments;
        va_start(arguments, format);
        int length = std::vsnprintf(answer_, sizeof(answer_) - 1, format, arguments);
        va_end(arguments);
        if (length < 0) {
            return;
        }
        if (static_cast<size_t>(length) >= sizeof(answer_) - 1) {
            length = static_cast<int>(sizeof(answer_)) - 2;
        }
        answer_[length] = '\n';
        port_.Write(answer_, static_cast<size_t>(length) + 1);
    }

    Model &model_;
    Port &port_;
    Description description_;
    Statistics statistics_;
    size_t length_ = 0;
    bool too_long_ = false;
    char line_[kLongestLine];
    char answer_[1024];
};

}  // namespace optigpu
