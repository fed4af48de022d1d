#include "channel/mailbox.h"

#include <algorithm>

#include "channel/channel.h"
#include "wire/relay.h"

namespace resilient {
namespace {

std::string describe(const OpSignature& s, uint64_t bytes) {
  return s.toString() + ", " + std::to_string(bytes) + " bytes";
}

bool isCollective(uint64_t stream) {
  return (stream & kCollectiveBit) != 0;
}

// Point-to-point: both ends name their tensor. Collective: the signature was
// checked for the whole operation, only sizes by rank are left.
bool agree(const RecvOp& op, const FrameHeader& h) {
  return op.bytes == h.totalBytes &&
      (!op.ordered || op.signature.dtype == h.signature.dtype);
}

} // namespace

// Both texts (ours and the one the sender gets) name both sides.
void Mailbox::bind(RecvOp* op, InMessage& message) {
  op->matchedRank = message.header.sourceRank;
  op->matchedSource = &message.channel;
  if (message.cancelled) {
    const Status status(message.cancelCode, message.cancelReason);
    message.channel.drop(message);
    completions_.push(op, status);
    return;
  }
  if (!agree(*op, message.header)) {
    const std::string text = "rank " +
        std::to_string(message.header.sourceRank) + " sent " +
        describe(message.header.signature, message.header.totalBytes) +
        ", but the receiver expects " + describe(op->signature, op->bytes);
    message.channel.reject(message, StatusCode::kMismatch, text);
    completions_.push(op, Status(StatusCode::kMismatch, text));
    return;
  }
  message.op = op;
  op->message = &message;
  message.channel.matched(message);
}

// A receive of a failed channel still gets a message that has arrived whole, so
// the match is tried before the failure is reported.
void Mailbox::post(RecvOp* op) {
  op->message = nullptr;
  op->matchedRank = -1;
  op->matchedSource = nullptr;
  if (closed_.contains(op->key.group)) {
    completions_.push(
        op, Status(StatusCode::kAborted, "the group was destroyed"));
    return;
  }
  GroupState& group = groups_[op->key.group];
  if (op->ordered) {
    Ordered& stream = group.ordered[op->key.stream];
    stream.posted.push_back(op);
    matchOrdered(stream);
    if (op->source != nullptr && !op->source->failure().ok() &&
        op->matchedSource == nullptr) {
      std::erase(stream.posted, op);
      completions_.push(op, op->source->failure());
    }
    return;
  }
  Exact& exact = group.exact[op->key.stream & ~kCollectiveBit];
  const std::pair key(op->key.order, op->source->id());
  auto [it, fresh] = exact.entries.try_emplace(key);
  if (!fresh && it->second.message != nullptr) {
    InMessage& message = *it->second.message;
    exact.entries.erase(it);
    bind(op, message);
    return;
  }
  if (!op->source->failure().ok()) {
    exact.entries.erase(it);
    completions_.push(op, op->source->failure());
    return;
  }
  it->second.op = op;
}

void Mailbox::matchOrdered(Ordered& stream) {
  // Posted receives in order; each takes the next message of its source, or
  // (any source) of the lowest channel id that has one.
  for (auto it = stream.posted.begin(); it != stream.posted.end();) {
    RecvOp* op = *it;
    Source* source = nullptr;
    if (op->source != nullptr) {
      source = &stream.sources[op->source->id()];
      if (!source->ready()) {
        source = nullptr;
      }
    } else {
      for (auto& [id, s] : stream.sources) {
        if (s.ready()) {
          source = &s;
          break;
        }
      }
    }
    if (source == nullptr) {
      ++it;
      continue;
    }
    it = stream.posted.erase(it);
    auto first = source->arrived.begin();
    source->nextOrder = first->first + 1;
    InMessage& message = *first->second;
    source->arrived.erase(first);
    bind(op, message);
  }
}

void Mailbox::onArrival(InMessage& message) {
  const FrameHeader& h = message.header;
  if (h.group == kRelayGroup) {
    if (RecvOp* const op = listener_.onRelayed(h, message.channel)) {
      op->message = nullptr;
      bind(op, message);
    } else {
      message.channel.reject(
          message, StatusCode::kAborted, "this rank does not relay it");
    }
    return;
  }
  if (closed_.contains(h.group)) {
    message.channel.reject(
        message, StatusCode::kPeerLeft, "the receiver has left the group");
    return;
  }
  GroupState& group = groups_[h.group];
  if (isCollective(h.stream)) {
    arriveExact(group, message);
    return;
  }
  Ordered& stream = group.ordered[h.stream];
  Source& source = stream.sources[message.channel.id()];
  if (h.order < source.nextOrder ||
      !source.arrived.emplace(h.order, &message).second) {
    message.channel.reject(
        message, StatusCode::kProtocol, "two messages with one number");
    return;
  }
  matchOrdered(stream);
}

void Mailbox::arriveExact(GroupState& group, InMessage& message) {
  const FrameHeader& h = message.header;
  const uint64_t sequence = h.stream & ~kCollectiveBit;
  if (group.endedNumbers.contains(sequence)) {
    refuseEnded(group, sequence, message);
    return;
  }
  Exact& exact = group.exact[sequence];
  if (exact.begun && exact.signature != h.signature && !message.cancelled) {
    const FrameHeader remote = h;
    const OpSignature local = exact.signature;
    Channel& channel = message.channel;
    channel.reject(
        message, StatusCode::kMismatch, mismatchText(sequence, local, remote));
    listener_.onCollectiveMismatch(
        remote.group, sequence, local, remote, channel);
    return;
  }
  auto [it, fresh] = exact.entries.try_emplace({h.order, message.channel.id()});
  if (fresh) {
    it->second.message = &message;
    return;
  }
  RecvOp* op = it->second.op;
  if (op == nullptr) {
    message.channel.reject(
        message, StatusCode::kProtocol, "two messages with one number");
    return;
  }
  exact.entries.erase(it);
  bind(op, message);
}

std::string Mailbox::mismatchText(
    uint64_t sequence,
    const OpSignature& local,
    const FrameHeader& remote) {
  return "collective #" + std::to_string(sequence) + " does not match: rank " +
      std::to_string(remote.sourceRank) + " called " +
      remote.signature.toString() + " where the receiver called " +
      local.toString();
}

void Mailbox::refuseEnded(
    GroupState& group,
    uint64_t sequence,
    InMessage& message) {
  const auto ended =
      std::find_if(group.ended.begin(), group.ended.end(), [&](const Ended& e) {
        return e.sequence == sequence;
      });
  Channel& channel = message.channel;
  if (ended == group.ended.end()) {
    channel.reject(
        message,
        StatusCode::kAborted,
        "collective #" + std::to_string(sequence) +
            " ended long ago at the receiver");
    return;
  }
  const FrameHeader remote = message.header;
  if (ended->signature != remote.signature && !message.cancelled) {
    const OpSignature local = ended->signature;
    channel.reject(
        message, StatusCode::kMismatch, mismatchText(sequence, local, remote));
    listener_.onCollectiveMismatch(
        remote.group, sequence, local, remote, channel);
    return;
  }
  channel.reject(
      message,
      ended->outcome.ok() ? StatusCode::kAborted : ended->outcome.code(),
      ended->outcome.ok() ? "the receiver has ended this collective"
                          : ended->outcome.message());
}

void Mailbox::begin(
    uint64_t groupId,
    uint64_t sequence,
    const OpSignature& signature) {
  GroupState& group = groups_[groupId];
  Exact& exact = group.exact[sequence];
  exact.begun = true;
  exact.signature = signature;
  // Checks the messages that came early.
  std::vector<InMessage*> wrong;
  for (auto it = exact.entries.begin(); it != exact.entries.end();) {
    InMessage* m = it->second.message;
    if (m != nullptr && !m->cancelled && m->header.signature != signature) {
      wrong.push_back(m);
      it = exact.entries.erase(it);
    } else {
      ++it;
    }
  }
  for (InMessage* m : wrong) {
    const FrameHeader remote = m->header;
    Channel& channel = m->channel;
    channel.reject(
        *m, StatusCode::kMismatch, mismatchText(sequence, signature, remote));
    listener_.onCollectiveMismatch(
        groupId, sequence, signature, remote, channel);
  }
}

// Receives without a message get the outcome. Messages without a receive are
// refused, as later stragglers of this sequence number are. All records are
// updated before a refusal, which calls into the channels.
void Mailbox::end(uint64_t groupId, uint64_t sequence, const Status& outcome) {
  auto found = groups_.find(groupId);
  if (found == groups_.end()) {
    return;
  }
  GroupState& group = found->second;
  auto exact = group.exact.find(sequence);
  OpSignature signature;
  std::vector<InMessage*> left;
  if (exact != group.exact.end()) {
    signature = exact->second.signature;
    for (auto& [key, entry] : exact->second.entries) {
      if (entry.message != nullptr) {
        left.push_back(entry.message);
      } else if (entry.op != nullptr) {
        completions_.push(entry.op, outcome);
      }
    }
    group.exact.erase(exact);
  }
  group.endedNumbers.insert(sequence);
  group.ended.push_back(Ended{sequence, signature, outcome});
  if (group.ended.size() > kEndedKept) {
    group.ended.pop_front();
  }
  for (InMessage* m : left) {
    refuseEnded(group, sequence, *m);
  }
}

// Four states of the receive: ended and in the completion queue; matched, so
// its message is rejected; waiting in an ordered stream; waiting in a
// collective.
void Mailbox::cancel(RecvOp* op, const std::string& reason) {
  if (completions_.remove(op)) {
    return;
  }
  if (op->message != nullptr) {
    InMessage& message = *op->message;
    op->message = nullptr;
    message.op = nullptr;
    message.channel.reject(message, StatusCode::kAborted, reason);
    return;
  }
  auto found = groups_.find(op->key.group);
  if (found == groups_.end()) {
    return;
  }
  GroupState& group = found->second;
  if (op->ordered) {
    auto stream = group.ordered.find(op->key.stream);
    if (stream != group.ordered.end()) {
      std::erase(stream->second.posted, op);
    }
    return;
  }
  auto exact = group.exact.find(op->key.stream & ~kCollectiveBit);
  if (exact == group.exact.end()) {
    return;
  }
  auto entry = exact->second.entries.find({op->key.order, op->source->id()});
  if (entry != exact->second.entries.end() && entry->second.op == op) {
    exact->second.entries.erase(entry);
  }
}

void Mailbox::onLost(InMessage& message, const Status& status) {
  const FrameHeader& h = message.header;
  if (message.op != nullptr) {
    RecvOp* op = message.op;
    message.op = nullptr;
    op->message = nullptr;
    completions_.push(op, status);
    return;
  }
  auto found = groups_.find(h.group);
  if (found == groups_.end()) {
    return;
  }
  GroupState& group = found->second;
  if (!isCollective(h.stream)) {
    auto stream = group.ordered.find(h.stream);
    if (stream != group.ordered.end()) {
      stream->second.sources[message.channel.id()].arrived.erase(h.order);
    }
    return;
  }
  auto exact = group.exact.find(h.stream & ~kCollectiveBit);
  if (exact != group.exact.end()) {
    exact->second.entries.erase({h.order, message.channel.id()});
  }
}

void Mailbox::failSource(Channel& channel, const Status& status) {
  for (auto& [id, group] : groups_) {
    for (auto& [tag, stream] : group.ordered) {
      for (auto it = stream.posted.begin(); it != stream.posted.end();) {
        if ((*it)->source == &channel) {
          completions_.push(*it, status);
          it = stream.posted.erase(it);
        } else {
          ++it;
        }
      }
    }
    for (auto& [sequence, exact] : group.exact) {
      for (auto it = exact.entries.begin(); it != exact.entries.end();) {
        RecvOp* op = it->second.op;
        if (op != nullptr && op->source == &channel) {
          completions_.push(op, status);
          it = exact.entries.erase(it);
        } else {
          ++it;
        }
      }
    }
  }
}

// Moves the records of the group out first, since rejecting a message calls
// into its channel.
void Mailbox::closeGroup(uint64_t groupId) {
  closed_.insert(groupId);
  auto found = groups_.find(groupId);
  if (found == groups_.end()) {
    return;
  }
  GroupState group = std::move(found->second);
  groups_.erase(found);
  const Status gone(StatusCode::kAborted, "the group was destroyed");
  std::vector<InMessage*> left;
  for (auto& [tag, stream] : group.ordered) {
    for (RecvOp* op : stream.posted) {
      completions_.push(op, gone);
    }
    for (auto& [id, source] : stream.sources) {
      for (auto& [order, message] : source.arrived) {
        left.push_back(message);
      }
    }
  }
  for (auto& [sequence, exact] : group.exact) {
    for (auto& [key, entry] : exact.entries) {
      if (entry.op != nullptr) {
        completions_.push(entry.op, gone);
      } else {
        left.push_back(entry.message);
      }
    }
  }
  for (InMessage* m : left) {
    m->channel.reject(
        *m, StatusCode::kPeerLeft, "the receiver has left the group");
  }
}

} // namespace resilient
