// Memory shared by processes of a node.
#pragma once

#include <cstdint>
#include <memory>

namespace carme {

inline uint64_t page_up(uint64_t size) { return (size + 4095) & ~uint64_t(4095); }

// Memory that other processes of this user can map by the number of an open file.
class Mapping {
public:
    static std::shared_ptr<Mapping> create(const char* name, uint64_t size);
    static std::shared_ptr<Mapping> open(int pid, int fd, uint64_t offset, uint64_t size);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    char* data() const { return data_; }
    uint64_t size() const { return size_; }
    int fd() const { return fd_; }

private:
    Mapping(char* data, uint64_t size, int fd) : data_(data), size_(size), fd_(fd) {}
    char* data_;
    uint64_t size_;
    int fd_;  // -1 if another process owns it
};

}  // namespace carme
