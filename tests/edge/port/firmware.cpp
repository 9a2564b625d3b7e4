// The session of the serial firmware on a host, with a made-up model: stdin and stdout are the line.
//
//     firmware INPUT_BYTES OUTPUT_BYTES LATENCIES [FAULT]
//
// LATENCIES: microseconds with commas, taken in turn. FAULT: noise (a boot loader's lines come first), fail (inferences
// fail), restart (the board boots again instead of the second inference), damage (the input loses a bit on the line),
// silent (the first request is not heard), output (the output's bytes change on the line).
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "session.h"

namespace {

class MadeUpModel : public optigpu::Model {
public:
    MadeUpModel(size_t input_bytes, size_t output_bytes, std::vector<uint64_t> latencies, std::string fault)
        : input_(input_bytes), output_(output_bytes), latencies_(std::move(latencies)), fault_(std::move(fault)) {}

    size_t input_bytes() const override { return input_.size(); }
    size_t output_bytes() const override { return output_.size(); }
    uint8_t *input() override { return input_.data(); }
    const uint8_t *output() const override { return output_.data(); }

    // Each output byte is the sum of the input's bytes and its own number.
    const char *Invoke(uint64_t &us) override {
        if (fault_ == "fail") {
            return "An operator failed.";
        }
        if (fault_ == "damage") {
            input_[0] ^= 1;
        }
        uint32_t sum = 0;
        for (const uint8_t byte : input_) {
            sum += byte;
        }
        for (size_t i = 0; i < output_.size(); ++i) {
            output_[i] = static_cast<uint8_t>(sum + i);
        }
        us = latencies_[invocations_++ % latencies_.size()];
        return nullptr;
    }

    size_t invocations() const { return invocations_; }

private:
    std::vector<uint8_t> input_;
    std::vector<uint8_t> output_;
    std::vector<uint64_t> latencies_;
    std::string fault_;
    size_t invocations_ = 0;
};

class StandardPort : public optigpu::Port {
public:
    explicit StandardPort(std::string fault) : fault_(std::move(fault)) {}

    void Write(const char *text, size_t length) override {
        std::string line(text, length);
        const size_t at = line.find("\"data\":\"");
        if (fault_ == "output" && at != std::string::npos) {
            line[at + 8] = line[at + 8] == '0' ? '1' : '0';
        }
        Raw(line);
    }

    void Raw(const std::string &text) const {
        if (write(STDOUT_FILENO, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
            std::exit(1);
        }
    }

    uint32_t HeapFree() const override { return 123456; }

private:
    std::string fault_;
};

std::vector<uint64_t> Numbers(const std::string &text) {
    std::vector<uint64_t> numbers;
    for (size_t at = 0; at < text.size(); at = text.find(',', at) == std::string::npos ? text.size() : text.find(',', at) + 1) {
        numbers.push_back(std::strtoull(text.c_str() + at, nullptr, 10));
    }
    return numbers;
}

}  // namespace

int main(int count, char **arguments) {
    if (count < 4) {
        return 2;
    }
    const std::string fault = count > 4 ? arguments[4] : "";
    MadeUpModel model(std::strtoul(arguments[1], nullptr, 10), std::strtoul(arguments[2], nullptr, 10),
                      Numbers(arguments[3]), fault);
    StandardPort port(fault);
    const std::string model_sha256(64, 'a');
    const std::string firmware_sha256(64, 'b');
    const optigpu::Description description = {
        "1", "esp32s3", "power_on", model_sha256.c_str(), firmware_sha256.c_str(), 240000000, 210288, true};
    optigpu::Session session(model, port, description);
    if (fault == "noise") {
        port.Raw("ESP-ROM:esp32s3-20210327\r\n\xff\xfe{not json}\nI (24) boot: chip revision: v0.2\r\n");
    }
    session.Begin();
    bool hears = fault != "silent";
    char byte;
    while (read(STDIN_FILENO, &byte, 1) == 1) {
        if (!hears) {
            hears = byte == '\n';
            continue;
        }
        if (fault == "restart" && model.invocations() == 1 && byte == '\n') {
            session.Begin();
            continue;
        }
        session.Receive(byte);
    }
    return 0;
}
