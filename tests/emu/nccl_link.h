/* How the ranks of the twin of NCCL reach each other: a socket between rank 0 and every other rank, on this machine. */
#ifndef MTP_EMU_NCCL_LINK_H
#define MTP_EMU_NCCL_LINK_H

#include <atomic>
#include <string>
#include <vector>

#include <cstddef>

namespace emu
{

class Link
{
  public:
    Link(std::string name, int rank, int ranks);
    ~Link();
    Link(const Link &) = delete;
    Link &operator=(const Link &) = delete;

    bool open(); /* waits for all ranks, a minute at most */
    bool send(int rank, const void *data, size_t bytes);
    bool receive(int rank, void *data, size_t bytes);
    void abort(); /* from any thread: whoever waits stops waiting */

  private:
    bool accept_all();
    bool connect_to_first();

    const std::string name_;
    const int rank_, ranks_;
    std::vector<int> sockets_; /* by rank; -1 where there is none */
    std::atomic<bool> aborted_{false};
};

} // namespace emu

#endif
