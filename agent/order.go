package agent

import (
	"cmp"

	"github.com/gpuaas/gpuaas/protocol"
)

// StateNumber is the place of a desired state in the order of a node's states: by epoch, then by generation.
type StateNumber struct{ Epoch, Generation uint64 }

// NumberOf returns the number of a desired state; nil has the lowest.
func NumberOf(d *protocol.DesiredState) StateNumber {
	return StateNumber{d.GetEpoch(), d.GetGeneration()}
}

// Compare orders two numbers.
func (n StateNumber) Compare(o StateNumber) int {
	return cmp.Or(cmp.Compare(n.Epoch, o.Epoch), cmp.Compare(n.Generation, o.Generation))
}

// CheckOrder refuses the number of a state that is older than the highest one that the node has accepted.
func (n StateNumber) CheckOrder(highest StateNumber) error {
	switch {
	case n.Epoch < highest.Epoch:
		return protocol.Refuse(protocol.Nack_EPOCH_UNKNOWN, "the desired state is of epoch %d, this node has accepted "+
			"epoch %d", n.Epoch, highest.Epoch)
	case n.Compare(highest) < 0:
		return protocol.Refuse(protocol.Nack_GENERATION_OLDER, "generation %d is older than generation %d, which this node "+
			"has accepted", n.Generation, highest.Generation)
	}
	return nil
}

// CheckContent refuses a state that has the number of the accepted one and other content; same says that the content is
// the same.
func (n StateNumber) CheckContent(accepted StateNumber, same bool) error {
	if n == accepted && !same {
		return protocol.Refuse(protocol.Nack_GENERATION_CONFLICT, "this node has accepted other content under generation %d",
			accepted.Generation)
	}
	return nil
}
