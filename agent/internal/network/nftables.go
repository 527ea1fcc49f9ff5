package network

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// nonRecursive is NLM_F_NONREC (linux/netlink.h): do not delete recursively.
const nonRecursive = 0x100

// deleteUnused deletes these chains and their table in one batch, if none of them holds or is used by a rule. nft's own
// command would delete the table with whatever is in it by then.
func deleteUnused(family, table string, chains []string) error {
	proto := map[string]uint8{"ip": unix.NFPROTO_IPV4, "ip6": unix.NFPROTO_IPV6}[family]
	if proto == 0 {
		return fmt.Errorf("unexpected table family %q", family)
	}
	sock, err := nl.Subscribe(unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open a socket to the firewall: %w", err)
	}
	defer sock.Close()
	if err := sock.SetReceiveTimeout(&unix.Timeval{Sec: int64(commandTimeout.Seconds())}); err != nil {
		return err
	}
	var batch []byte
	message := func(kind uint16, flags uint16, family uint8, resource uint16, seq uint32, attrs ...[]byte) {
		body := []byte{family, unix.NFNETLINK_V0, byte(resource >> 8), byte(resource)}
		for _, a := range attrs {
			body = append(body, a...)
		}
		header := make([]byte, unix.NLMSG_HDRLEN)
		binary.NativeEndian.PutUint32(header, uint32(len(header)+len(body)))
		binary.NativeEndian.PutUint16(header[4:], kind)
		binary.NativeEndian.PutUint16(header[6:], unix.NLM_F_REQUEST|flags)
		binary.NativeEndian.PutUint32(header[8:], seq)
		batch = append(append(batch, header...), body...)
	}
	const subsystem = uint16(unix.NFNL_SUBSYS_NFTABLES) << 8
	message(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, 1)
	for _, chain := range chains {
		message(subsystem|unix.NFT_MSG_DELCHAIN, nonRecursive, proto, 0, 2, text(unix.NFTA_CHAIN_TABLE, table), text(unix.NFTA_CHAIN_NAME, chain))
	}
	message(subsystem|unix.NFT_MSG_DELTABLE, nonRecursive|unix.NLM_F_ACK, proto, 0, 3, text(unix.NFTA_TABLE_NAME, table))
	message(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, 4)
	if err := unix.Sendto(sock.GetFd(), batch, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("ask the firewall: %w", err)
	}
	return readAck(sock)
}

// text is a netlink attribute with a string, padded to four bytes.
func text(kind uint16, s string) []byte {
	value := append([]byte(s), 0)
	a := make([]byte, 4, 4+len(value)+3)
	binary.NativeEndian.PutUint16(a, uint16(4+len(value)))
	binary.NativeEndian.PutUint16(a[2:], kind)
	a = append(a, value...)
	for len(a)%4 != 0 {
		a = append(a, 0)
	}
	return a
}

// readAck reads the answer to the batch. In use or gone meanwhile is no failure: there is nothing to remove then.
func readAck(sock *nl.NetlinkSocket) error {
	messages, _, err := sock.Receive()
	if err != nil {
		return fmt.Errorf("read the firewall's answer: %w", err)
	}
	for _, m := range messages {
		if m.Header.Type != unix.NLMSG_ERROR || len(m.Data) < 4 {
			continue
		}
		errno := unix.Errno(-int32(binary.NativeEndian.Uint32(m.Data)))
		if errno != 0 && !errors.Is(errno, unix.EBUSY) && !errors.Is(errno, unix.ENOENT) {
			return fmt.Errorf("remove an empty firewall table: %w", errno)
		}
	}
	return nil
}
