#pragma once

#include <cstddef>
#include <vector>

namespace resilient {

// A source of messages in memory that another process or a device writes to. A
// descriptor tells of them only on demand. Called in the loop only, or with the
// turn's lock held. A poller outlives its place in the set: remove it before it
// is destroyed.
struct Poller {
  virtual ~Poller() = default;
  // Whether onNews() has something to do. A waiting thread asks over and over,
  // so it must be almost as cheap as reading a word.
  virtual bool hasNews() = 0;
  virtual void onNews() = 0;
  // Whether more is about to come: then it is not worth falling asleep.
  virtual bool inMidst() const = 0;
  // Whether a process of this host writes: it needs a processor itself.
  virtual bool hasWriterHere() const = 0;
  // Whether that process was last seen awake on this processor.
  virtual bool writerIsOn(int processor) const = 0;
  // true: no thread asks any more, so the writer has to signal a descriptor as
  // well. The loop asks once more after this call, so no message is missed in
  // between.
  virtual void setAsleep(bool asleep) = 0;
};

// The pollers of a loop, all awake or all asleep. Not owned, not locked: the
// loop's turn lock guards it.
//
// Removing leaves a gap until the next runNews(), which keeps the places of the
// others while a loop goes through them.
class PollerSet {
 public:
  bool empty() const {
    return pollers_.empty();
  }
  size_t writersHere() const;
  // A new one is put to sleep if the others are.
  void add(Poller* poller);
  // Also while runNews() or setAsleep() goes through them.
  void remove(Poller* poller);

  bool hasNews();
  bool inMidst() const;
  bool writerIsOn(int processor) const;
  // Calls onNews() of all that have something to do.
  void runNews();

  void wake();
  // Repeats the call for pollers that sleep already: one that a message has
  // woken since is awake.
  void putToSleep();

 private:
  std::vector<Poller*> pollers_; // null: removed
  bool asleep_ = false;
};

} // namespace resilient
