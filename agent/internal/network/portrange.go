package network

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// insertRangeRules puts rules that masquerade with a range of ports at the head of their chain. This is the one thing
// that the nftables library cannot express: it sends the range, but not the flag that makes the kernel use it
// (NF_NAT_RANGE_PROTO_SPECIFIED). Until the rules are there, members' flows leave by any port.
func insertRangeRules(chain *nftables.Chain, rules []rule) error {
	if len(rules) == 0 {
		return nil
	}
	kernel, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	defer func() { _ = kernel.Close() }()
	batch := []netlink.Message{batchMessage(unix.NFNL_MSG_BATCH_BEGIN)}
	for _, r := range slices.Backward(rules) { // each goes before the one that was inserted last
		m, err := insertMessage(chain, r)
		if err != nil {
			return err
		}
		batch = append(batch, m)
	}
	if _, err := kernel.SendMessages(append(batch, batchMessage(unix.NFNL_MSG_BATCH_END))); err != nil {
		return fmt.Errorf("send rules with port ranges: %w", err)
	}
	for range rules {
		if _, err := kernel.Receive(); err != nil {
			return fmt.Errorf("insert rules with port ranges: %w", err)
		}
	}
	return nil
}

// nfgenmsg is the header of each nftables message (linux/netfilter/nfnetlink.h).
func nfgenmsg(family byte, resource uint16) []byte {
	return binary.BigEndian.AppendUint16([]byte{family, unix.NFNETLINK_V0}, resource)
}

func batchMessage(kind uint16) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(kind), Flags: netlink.Request},
		Data:   nfgenmsg(unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES),
	}
}

func insertMessage(chain *nftables.Chain, r rule) (netlink.Message, error) {
	var parts []netlink.Attribute
	for _, e := range r {
		data, err := expr.Marshal(byte(chain.Table.Family), e)
		if masq, ok := e.(*expr.Masq); ok {
			data, err = marshalMasquerade(masq)
		}
		if err != nil {
			return netlink.Message{}, err
		}
		parts = append(parts, netlink.Attribute{Type: unix.NLA_F_NESTED | unix.NFTA_LIST_ELEM, Data: data})
	}
	expressions, err := netlink.MarshalAttributes(parts)
	if err != nil {
		return netlink.Message{}, err
	}
	attributes, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_RULE_TABLE, Data: []byte(chain.Table.Name + "\x00")},
		{Type: unix.NFTA_RULE_CHAIN, Data: []byte(chain.Name + "\x00")},
		{Type: unix.NLA_F_NESTED | unix.NFTA_RULE_EXPRESSIONS, Data: expressions},
	})
	return netlink.Message{
		Header: netlink.Header{
			Type:  unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE,
			Flags: netlink.Request | netlink.Acknowledge | netlink.Create,
		},
		Data: append(nfgenmsg(byte(chain.Table.Family), 0), attributes...),
	}, err
}

func marshalMasquerade(m *expr.Masq) ([]byte, error) {
	number := func(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
	data, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_MASQ_FLAGS, Data: number(unix.NF_NAT_RANGE_PROTO_SPECIFIED)},
		{Type: unix.NFTA_MASQ_REG_PROTO_MIN, Data: number(m.RegProtoMin)},
		{Type: unix.NFTA_MASQ_REG_PROTO_MAX, Data: number(m.RegProtoMax)},
	})
	if err != nil {
		return nil, err
	}
	return netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_EXPR_NAME, Data: []byte("masq\x00")},
		{Type: unix.NLA_F_NESTED | unix.NFTA_EXPR_DATA, Data: data},
	})
}
