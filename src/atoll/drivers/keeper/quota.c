/* The disk quota of a sandbox's active layer.
 *
 * Owns the quota group of a btrfs subvolume, and project quotas (XFS, ext4). Not here: making the layer a subvolume or
 * giving it a project, and lifting the quota of the previous run (`storage.py`): overlayfs mounts read-only if it
 * cannot write. The quota is set after all is mounted and before anything runs. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/btrfs.h>
#include <linux/dqblk_xfs.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <linux/quota.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "keeper.h"

enum { SECTOR = 512, BLOCK = 4096, SPARE_FILES = 1024, QUOTACTL_FD = 443 };

static int limit_subvolume(int layer, uint64_t bytes)
{
    struct btrfs_ioctl_qgroup_limit_args args = {.lim = {.flags = BTRFS_QGROUP_LIMIT_MAX_RFER, .max_rfer = bytes}};
    return ioctl(layer, BTRFS_IOC_QGROUP_LIMIT, &args);
}

static int limit_project(int layer, uint64_t bytes)
{
    struct fsxattr attributes;
    if (ioctl(layer, FS_IOC_FSGETXATTR, &attributes) < 0)
        return -1;
    if (!attributes.fsx_projid) {
        errno = EINVAL;
        return -1;
    }
    struct fs_disk_quota quota = {
        .d_version = FS_DQUOT_VERSION,
        .d_flags = FS_PROJ_QUOTA,
        .d_fieldmask = FS_DQ_BHARD | FS_DQ_IHARD,
        .d_id = attributes.fsx_projid,
        .d_blk_hardlimit = (bytes + SECTOR - 1) / SECTOR,
        /* Empty files use no blocks, so inodes are limited too. Other files reach the limit on blocks first. */
        .d_ino_hardlimit = bytes / BLOCK + SPARE_FILES,
    };
    return (int)syscall(QUOTACTL_FD, layer, QCMD(Q_XSETQLIM, PRJQUOTA), quota.d_id, &quota);
}

int set_quota(int layer, uint64_t bytes)
{
    struct statfs filesystem;
    if (fstatfs(layer, &filesystem) < 0)
        return -1;
    return filesystem.f_type == BTRFS_SUPER_MAGIC ? limit_subvolume(layer, bytes) : limit_project(layer, bytes);
}
