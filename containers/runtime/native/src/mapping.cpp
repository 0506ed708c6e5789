#include "mapping.hpp"

#include <cerrno>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "failure.hpp"

namespace carme {
namespace {

// The remedy for a system error. The limit of open files has one of its own.
const char* remedy_for(int error, const char* fallback) {
    if (error == EMFILE) return "Allow this process more open files: ulimit -n 4096.";
    if (error == ENFILE)
        return "This host has no open files left: ask its administrators to raise fs.file-max.";
    return fallback;
}

}  // namespace

std::shared_ptr<Mapping> Mapping::create(const char* name, uint64_t size) {
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0) {
        int error = errno;
        throw Failure(FailureKind::resource, "No shared memory can be made: " + error_text(error) + ".",
                      remedy_for(error, "Ask the site for a kernel with memfd_create."));
    }
    if (ftruncate(fd, off_t(size)) != 0) {
        int error = errno;
        ::close(fd);
        throw Failure(
            FailureKind::resource,
            "Shared memory of " + std::to_string(size) + " bytes was refused: " + error_text(error) + ".",
            "Use a smaller segment, or start a job with more memory.");
    }
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
        int error = errno;
        ::close(fd);
        throw Failure(FailureKind::resource,
                      "Shared memory of " + std::to_string(size) +
                          " bytes cannot be mapped: " + error_text(error) + ".",
                      "Use a smaller segment, or start a job with more memory.");
    }
    return std::shared_ptr<Mapping>(new Mapping(static_cast<char*>(data), size, fd));
}

std::shared_ptr<Mapping> Mapping::open(int pid, int fd, uint64_t offset, uint64_t size) {
    std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    int local_fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (local_fd < 0) {
        int error = errno;
        throw Failure(
            FailureKind::resource,
            "The memory of process " + std::to_string(pid) + " cannot be opened: " + error_text(error) + ".",
            remedy_for(error,
                       "Start all ranks of a node as one user in one container, or in containers "
                       "that share their namespaces (apptainer exec --sharens)."));
    }
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, local_fd, off_t(offset));
    int error = errno;
    ::close(local_fd);
    if (data == MAP_FAILED)
        throw Failure(
            FailureKind::resource,
            "The memory of process " + std::to_string(pid) + " cannot be mapped: " + error_text(error) + ".",
            "Use smaller segments, or start a job with more memory.");
    return std::shared_ptr<Mapping>(new Mapping(static_cast<char*>(data), size, -1));
}

Mapping::~Mapping() {
    munmap(data_, size_);
    if (fd_ >= 0) ::close(fd_);
}

}  // namespace carme
