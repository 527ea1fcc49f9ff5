package runtime

import (
	"archive/tar"
	"encoding/binary"
	"fmt"
	"os"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// idShift moves the owners of a layer's files to the ids of containers while the layer is unpacked.
type idShift struct {
	// base is added to each id; zero leaves them as they are.
	base uint32
	// size is how many ids containers have; zero is no bound.
	size uint32
}

// Records of a layer's entries that hold ids (linux/capability.h, linux/posix_acl_xattr.h).
const (
	capabilityRecord = "SCHILY.xattr.security.capability"
	accessACLRecord  = "SCHILY.xattr.system.posix_acl_access"
	defaultACLRecord = "SCHILY.xattr.system.posix_acl_default"
)

// entry changes the owner that an entry of a layer gets, and the ids in its capabilities and access lists.
func (s idShift) entry(h *tar.Header) error {
	for _, id := range []*int{&h.Uid, &h.Gid} {
		if s.size > 0 && (*id < 0 || *id >= int(s.size)) {
			return fault.New(fault.Unprocessable, codeImagePullFailed, fmt.Sprintf("The image has a file of the user and group "+
				"%d:%d; containers have ids below %d.", h.Uid, h.Gid, s.size), fmt.Errorf("the owner of %q", h.Name)).Permanent()
		}
	}
	if s.base == 0 {
		return nil
	}
	h.Uid, h.Gid = h.Uid+int(s.base), h.Gid+int(s.base)
	for name, shift := range map[string]func([]byte) []byte{
		capabilityRecord: s.capability, accessACLRecord: s.acl, defaultACLRecord: s.acl,
	} {
		if value, has := h.PAXRecords[name]; has {
			h.PAXRecords[name] = string(shift([]byte(value)))
		}
	}
	return nil
}

// Layout of a file capability: revision 2 holds a magic number and 16 bytes, revision 3 the root user id after them.
const (
	capabilityRevision  = 0xff000000
	capabilityRevision2 = 0x02000000
	capabilityRevision3 = 0x03000000
	capabilityV2Bytes   = 20
	capabilityV3Bytes   = 24
)

// capability makes a file's capabilities count below the containers' root, as a mapped mount does.
func (s idShift) capability(value []byte) []byte {
	if len(value) != capabilityV2Bytes && len(value) != capabilityV3Bytes {
		return value
	}
	magic, root := binary.LittleEndian.Uint32(value), uint32(0)
	switch {
	case magic&capabilityRevision == capabilityRevision2 && len(value) == capabilityV2Bytes:
	case magic&capabilityRevision == capabilityRevision3 && len(value) == capabilityV3Bytes:
		root = binary.LittleEndian.Uint32(value[capabilityV2Bytes:])
	default:
		return value
	}
	shifted := binary.LittleEndian.AppendUint32(nil, magic&^uint32(capabilityRevision)|capabilityRevision3)
	shifted = append(shifted, value[4:capabilityV2Bytes]...)
	return binary.LittleEndian.AppendUint32(shifted, root+s.base)
}

// Layout of an access list: a version, then entries of a tag, permissions and an id, which only named users and groups
// have.
const (
	aclHeaderBytes, aclEntryBytes = 4, 8
	aclUser, aclGroup             = 0x02, 0x08
)

func (s idShift) acl(value []byte) []byte {
	for at := aclHeaderBytes; at+aclEntryBytes <= len(value); at += aclEntryBytes {
		entry := value[at : at+aclEntryBytes]
		if tag := binary.LittleEndian.Uint16(entry); tag == aclUser || tag == aclGroup {
			binary.LittleEndian.PutUint32(entry[4:], binary.LittleEndian.Uint32(entry[4:])+s.base)
		}
	}
	return value
}

// dir gives a directory for which no layer has an entry to the containers' root.
func (s idShift) dir(path string) error {
	if s.base == 0 {
		return nil
	}
	return os.Lchown(path, int(s.base), int(s.base))
}
